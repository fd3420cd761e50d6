"""Sizes and figures far beyond any pipeline are refused at once, in one sentence, wherever they are given."""

from __future__ import annotations

import argparse
import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main, parser
from megatron.zero_bubble.cli.playground.questions import read_question
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.trace import trace_to_json
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.schedules import build
from tests.core.formats.test_trace import recording

_LONGEST_S, _MORE_BYTES = 30, 3 * 2**30
TIMES = {"--forward-ms": "10", "--backward-ms": "10", "--wgrad-ms": "10"}
SIZES = {"--num-ranks": "2", "--num-microbatches": "3"}
JOB = {
    "--num-layers": "8",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--micro-batch-size": "2",
    "--global-batch-size": "32",
    "--pipeline-model-parallel-size": "4",
    "--train-iters": "10",
    "--lr": "1e-3",
    "--mock-data": "",
}
LIMIT = "ranks x stages per rank x microbatches x slices must be at most 2,000,000; got "
HUGE = ("10000000000", "100000000000000000000", "1" + 400 * "0")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    """Without its check, a size may take all memory or hours; then the test fails instead."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no answer after {_LONGEST_S} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MORE_BYTES, hard))
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_LONGEST_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def answer(capsys: Capture, *words: str) -> tuple[int, str]:
    """Return the exit code, and the only line on stderr of a command that was refused."""
    try:
        code = main(words)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    out, err = capsys.readouterr()
    signal.alarm(_LONGEST_S)  # for the next command of the test
    assert code in (0, 2)
    assert (code == 0) == bool(out) == (not err)
    assert err.count("\n") <= 1
    return code, err


def words_of(flags: dict[str, str]) -> list[str]:
    return [f"{flag}={value}" if value else flag for flag, value in flags.items()]


def numeric_flags(verb: str) -> list[str]:
    commands = next(action for action in parser(verb)._actions if isinstance(action, argparse._SubParsersAction))
    flags = [a for a in commands.choices[verb]._actions if a.option_strings and a.nargs != 0 and not a.choices]
    others = ("--costs", "--config", "--schedule", "--schedule-file", "--launch-command")
    return [flag for action in flags if (flag := action.option_strings[0]) not in others]


def needs(verb: str, flag: str) -> dict[str, str]:
    """Return the flags without which ``flag`` would be refused for another reason."""
    base = {**SIZES, **TIMES, **({"--schedule": "zb-h1"} if verb == "plan" else {"--equal-passes": ""})}
    base |= {} if verb == "plan" else {"--placement": "linear", "--max-chunks": "2"}
    if flag in ("--replicas", "--gather-ms", "--reduce-ms", "--unit-microbatches", "--whole-stages"):
        base |= {"--shard-weights": "", **({"--schedule": "zero-pp"} if verb == "plan" else {})}
    elif flag.startswith(("--host", "--node", "--ranks-per")):
        base |= {"--offload": "all", "--host-ms": "1", "--activation-memory": "1e9"}
    elif flag in ("--num-chunks", "--num-slices"):
        base |= {"--schedule": "interleaved-1f1b" if flag == "--num-chunks" else "seq-zb-h1"} if verb == "plan" else {}
    elif flag.endswith("-ms") and flag.startswith(("--output", "--embedding", "--collective")):
        base |= {"--vocabulary": "2", "--output-ms": "1", "--output-wgrad-ms": "1"}
    return base


@pytest.mark.parametrize("verb", ["plan", "compare"])
@pytest.mark.parametrize("value", [HUGE[0], pytest.param(HUGE[1], marks=pytest.mark.full), HUGE[2]])
def test_every_flag_refuses_or_accepts_any_number_at_once(capsys: Capture, verb: str, value: str) -> None:
    for flag in numeric_flags(verb):
        base = needs(verb, flag)
        if verb == "compare" and flag not in ("--num-ranks", "--num-microbatches", "--max-chunks", "--replicas"):
            continue  # those of plan, with the same checks
        answer(capsys, verb, *words_of({**base, flag: value}))


def test_sizes_are_checked_first_and_together(capsys: Capture) -> None:
    for verb, given, got in (
        ("plan", {"--num-ranks": "10000000000"}, "10,000,000,000 x 1 x 3 x 1"),
        ("compare", {"--num-microbatches": "1000001"}, "2 x 1 x 1,000,001 x 1"),
        ("plan", {"--schedule": "interleaved-1f1b", "--num-chunks": "1000000"}, "2 x 1,000,000 x 3 x 1"),
        (
            "plan",
            {"--schedule": "seq-1f1b", "--num-slices": "4000", "--num-microbatches": "400"},
            "2 x 1 x 400 x 4,000",
        ),
        ("plan", {"--schedule": "zb-auto", "--num-microbatches": "600000"}, "2 x 2 x 600,000 x 1"),
        ("compare", {"--num-microbatches": "20000", "--max-chunks": "60"}, "2 x 60 x 20,000 x 1"),
    ):
        code, err = answer(capsys, verb, *words_of({**needs(verb, ""), **given}))
        assert (code, err) == (2, f"zero-bubble {verb}: {LIMIT}{got}; {err.partition(f'{got}; ')[2]}")
        assert err.endswith("; give smaller numbers (more microbatches only repeat the steady state)\n")


def test_a_configuration_has_the_same_limits(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    model = {flag.removeprefix("--"): value for flag, value in JOB.items() if flag != "--mock-data"}
    for flag, value, expected in (
        ("pipeline-model-parallel-size", HUGE[0], LIMIT),
        ("global-batch-size", HUGE[0], LIMIT),
        ("num-layers", HUGE[0], "--num-layers must be at most 10,000; got 10,000,000,000"),
        ("num-layers", "-4", "--num-layers must be 1 or more; got -4"),
        ("pipeline-model-parallel-size", "0", "--pipeline-model-parallel-size must be 1 or more; got 0"),
        ("micro-batch-size", "0", "--micro-batch-size must be 1 or more; got 0"),
        ("num-layers", 5000 * "9", "must be YAML"),
    ):
        file.write_text("".join(f"{key}: {each}\n" for key, each in {**model, flag: value}.items()))
        code, err = answer(capsys, "plan", "--schedule", "zb-h1", "--config", str(file))
        assert (code, expected in err) == (2, True), err


def test_a_dry_run_has_the_same_limits(capsys: Capture) -> None:
    for own, given, expected in (
        ({"--nodes": HUGE[0]}, {}, "--nodes x --gpus-per-node must be at most 1,000,000; got 10,000,000,000 x 4"),
        ({}, {"--num-layers": HUGE[0]}, "--num-layers must be at most 10,000, got 10,000,000,000"),
        ({}, {"--global-batch-size": "64000000000"}, f"{LIMIT}4 x 1 x 32,000,000,000 x 1"),
        ({}, {"--pipeline-model-parallel-size": HUGE[0]}, "the number of processes must be divisible by"),
        ({}, {"--zero-bubble-schedule": "zb-h1", "--global-batch-size": "64000000000"}, LIMIT),
    ):
        words = [*words_of({"--gpus-per-node": "4", **own}), "--", *words_of({**JOB, **given})]
        code, err = answer(capsys, "dry-run", *words)
        assert (code, expected in err) == (2, True), err


def test_advice_has_the_same_limits(capsys: Capture) -> None:
    job = words_of({flag: value for flag, value in JOB.items() if flag not in ("--mock-data", "--train-iters", "--lr")})
    for nodes, expected in (
        (HUGE[0], "--nodes x --gpus-per-node must be at most 1,000,000; got "),
        ("0", "--nodes must"),
    ):
        code, err = answer(capsys, "advise", "--nodes", nodes, "--gpus-per-node", "4", "--", *job)
        assert (code, expected in err) == (2, True), err


def test_files_have_the_same_limits(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = {"schedule": "mine", "num_microbatches": 1, "stage_to_rank": [0], "order": [["0F0", "0BW0"]]}
    for change, expected in (
        ({"num_microbatches": 10**10}, f"{LIMIT}1 x 1 x 10,000,000,000 x 1"),
        ({"num_microbatches": 10**5, "order": [["0F0.4000", "0BW0.4000"]]}, f"{LIMIT}1 x 1 x 100,000 x 4,001"),
        ({"order": [["0F" + 5000 * "9"]]}, "a pass is written"),
        ({"num_microbatches": int(4000 * "9")}, "a number has at most 600 digits; got 99999999999999999999... of 4000"),
    ):
        file.write_text(json.dumps({**plan, **change}))
        code, err = answer(capsys, "plan", "--schedule-file", str(file), *words_of(TIMES))
        assert (code, expected in err) == (2, True), err


def test_orders_in_csv_and_in_traces_have_the_same_limits(capsys: Capture, tmp_path: Path) -> None:
    """Their sizes follow from their passes alone."""
    file = tmp_path / "plan.csv"
    for text, expected in (
        ("0F0,0B0\n900000000F0,900000000B0", "it must have passes of every stage from 0 on"),
        ("0F900000000,0B900000000", f"{LIMIT}1 x 1 x 900,000,001 x 1"),
    ):
        file.write_text(text)
        code, err = answer(capsys, "plan", "--schedule-file", str(file), *words_of(TIMES))
        assert (code, expected in err) == (2, True), err
    trace = json.loads(trace_to_json(recording()))
    trace["iterations"][0]["ranks"][0]["passes"][0][0] = "0F900000000"
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(trace))
    code, err = answer(capsys, "trace", str(file))
    assert (code, f"{LIMIT}2 x 1 x 900,000,001 x 1" in err) == (2, True), err


def test_the_library_has_the_same_limits() -> None:
    for make in (
        lambda: build("zb-h1", num_ranks=10**10, num_microbatches=8),
        lambda: build("zb-v", num_ranks=8, num_microbatches=10**5000),
        lambda: build("interleaved-1f1b", num_ranks=8, num_microbatches=8, num_chunks=10**10),
        lambda: Placement.linear(10**10),
        lambda: Placement.vee(10**10),
        lambda: Placement.interleaved(8, 10**10),
    ):
        with pytest.raises(UserError, match="must be at most 2,000,000; got .*; give smaller numbers"):
            make()


def test_the_playground_refuses_numbers_of_any_length() -> None:
    query = "schedule=seq-zb-h1&num-ranks=4&num-microbatches=4&num-slices=" + 5000 * "9"
    with pytest.raises(UserError, match="the playground allows at most 16 slices"):
        read_question(query)

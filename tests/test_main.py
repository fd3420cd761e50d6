"""Tests of the ``zero-bubble`` command: output, exit codes and flags."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.zero_bubble import SCHEDULES, PassCosts, Placement
from megatron.zero_bubble.__main__ import main, parser
from megatron.zero_bubble.core.formats.costs import costs_to_json

TIMES = "--forward-ms 2 --backward-ms 2 --wgrad-ms 1 --comm-ms 0.5".split()
PLAN = ["plan", "--schedule", "zb-h1", "--num-ranks", "2", "--num-microbatches", "4"]
JOB = "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1".split()
JOB += "--train-iters 1 --lr 1 --mock-data --global-batch-size 8".split()
Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: str) -> str:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def fails(capsys: Capture, *arguments: str) -> str:
    try:
        code: object = main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("zero-bubble")
    return err


def test_flags_are_exactly_the_listed_ones() -> None:
    """New flags are deliberate: a change that adds one also updates this list and docs/command-flags.md (generated)."""
    (verbs,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    flags = {
        name: [a.option_strings[-1] for a in verb._actions if a.option_strings] for name, verb in verbs.choices.items()
    }
    assert flags == {
        "list": ["--help"],
        "plan": [
            "--help", "--schedule", "--schedule-file", "--num-ranks", "--num-microbatches", "--forward-ms",
            "--backward-ms", "--wgrad-ms", "--attention-share", "--comm-ms", "--message-ms", "--activation-memory",
            "--wgrad-memory", "--costs", "--config", "--gpu", "--no-flash-attention", "--link-bandwidth",
            "--network-bandwidth", "--gpus-per-node", "--memory-limit", "--placement", "--objective", "--offload",
            "--vocabulary", "--shard-weights", "--early-recompute", "--host-memory", "--unit-microbatches",
            "--whole-stages", "--recompute-logits", "--num-slices", "--slice-cuts", "--layout", "--min-slice-tokens",
            "--num-chunks", "--output-ms", "--output-wgrad-ms", "--embedding-ms", "--embedding-wgrad-ms",
            "--collective-ms",
            "--host-ms", "--host-bandwidth", "--node-memory", "--ranks-per-node", "--ranks-per-link", "--gather-ms",
            "--reduce-ms", "--replicas", "--replica-bandwidth", "--lengths", "--pairs", "--equal-passes", "--step-ms",
            "--format",
        ],
        "compare": [
            "--help", "--num-ranks", "--num-microbatches", "--forward-ms", "--backward-ms", "--wgrad-ms",
            "--attention-share", "--comm-ms", "--message-ms", "--activation-memory", "--wgrad-memory", "--costs",
            "--config", "--gpu", "--no-flash-attention", "--link-bandwidth", "--network-bandwidth", "--gpus-per-node",
            "--memory-limit", "--placement", "--objective", "--offload", "--vocabulary", "--shard-weights",
            "--early-recompute", "--host-memory", "--unit-microbatches", "--whole-stages", "--recompute-logits",
            "--num-slices", "--slice-cuts", "--layout", "--min-slice-tokens", "--num-chunks", "--max-chunks",
            "--output-ms", "--output-wgrad-ms",
            "--embedding-ms", "--embedding-wgrad-ms", "--collective-ms", "--host-ms", "--host-bandwidth",
            "--node-memory", "--ranks-per-node", "--ranks-per-link", "--gather-ms", "--reduce-ms", "--replicas",
            "--replica-bandwidth", "--tensor-bandwidth", "--pairs", "--equal-passes", "--all",
            "--format",
        ],
        "advise": [
            "--help", "--nodes", "--gpus-per-node", "--gpu", "--tflops", "--efficiency", "--gpu-memory", "--costs",
            "--link-bandwidth", "--network-bandwidth", "--link-latency", "--network-latency", "--measured-ms",
            "--memory-limit", "--host-bandwidth", "--write", "--row", "--may-change", "--quick", "--format",
        ],
        "playground": [
            "--help", "--port", "--no-browser", "--static", "--config", "--nodes", "--gpus-per-node", "--gpu",
            "--tflops", "--efficiency", "--gpu-memory", "--costs", "--link-bandwidth", "--network-bandwidth",
            "--link-latency", "--network-latency", "--measured-ms", "--num-ranks",
        ],
        "trace": ["--help", "--iteration", "--format", "--output"],
        "dry-run": [
            "--help", "--nodes", "--gpus-per-node", "--gpu", "--tflops", "--efficiency", "--gpu-memory", "--costs",
            "--link-bandwidth", "--network-bandwidth", "--link-latency", "--network-latency", "--megatron-lm",
            "--launch-command",
        ],
        "catalogue": ["--help", "--gpu", "--output", "--only", "--search"],
        "report": ["--help", "--format"],
    }  # fmt: skip


def test_list_has_one_line_per_schedule(capsys: Capture) -> None:
    lines = run(capsys, "list").splitlines()[1:]
    assert [line.split()[0] for line in lines] == [*SCHEDULES, "zb-auto"]
    for line, recipe in zip(lines, SCHEDULES.values(), strict=False):
        assert recipe.bubble in line
        assert recipe.memory in line


def test_text_plan_shows_both_bubble_rates(capsys: Capture) -> None:
    out = run(capsys, *PLAN, *TIMES)
    picture, table = out.split("\n\n", 1)[1].split("\n\n", 1)
    assert picture.splitlines()[0].startswith("rank 0 |F0--- F1--- ")
    rates = {line.split()[0]: line.split()[1:4] for line in table.splitlines()[1:3]}
    plan = json.loads(run(capsys, *PLAN, *TIMES, "--format", "json"))
    for metric in ("span", "makespan"):
        bubble, idle = (f"{plan[f'{of}_{metric}']:.4f}" for of in ("bubble_rate", "idle_rate"))
        assert rates[metric] == [f"{plan[f'{metric}_ms']:.3f}", bubble, idle]
    assert "peak activation 2 microbatches per rank; by rank: 2 2" in table


def test_plan_renders_svg(capsys: Capture) -> None:
    assert run(capsys, *PLAN, *TIMES, "--format", "svg").startswith("<svg ")


def test_json_plan_is_accepted_as_schedule_file(capsys: Capture, tmp_path: Path) -> None:
    printed = run(capsys, *PLAN, *TIMES, "--format", "json")
    path = tmp_path / "plan.json"
    path.write_text(printed)
    assert run(capsys, "plan", "--schedule-file", str(path), *TIMES, "--format", "json") == printed
    again = run(capsys, "plan", "--schedule-file", str(path), "--num-ranks", "2", *TIMES, "--format", "json")
    assert again == printed


def test_memory_flags_count_a_ranks_whole_share(capsys: Capture) -> None:
    out = run(capsys, *PLAN, *TIMES, "--activation-memory", "10", "--wgrad-memory", "4", "--format", "json")
    assert json.loads(out)["peak_activation"] == pytest.approx([2.0, 1.4])


def test_costs_file_equals_time_flags(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(costs_to_json(PassCosts.uniform(Placement.linear(2), 2.0, 2.0, 1.0, 0.5)))
    by_flags = run(capsys, *PLAN, *TIMES, "--format", "json")
    assert run(capsys, *PLAN, "--costs", str(path), "--format", "json") == by_flags
    path.write_text('{"forward_ms": 2, "backward_ms": 2, "wgrad_ms": 1, "activation": 8, "wgrad": 0}')
    by_file = [*PLAN, "--costs", str(path), "--format", "json"]
    assert json.loads(run(capsys, *by_file))["peak_activation"] == [2.0, 1.0]
    assert json.loads(run(capsys, *by_file, "--wgrad-memory", "0.5"))["peak_activation"] == [2.0, 1.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a command is required: list, advise, plan, "),
        (["fly"], "invalid choice: 'fly'"),
        (["plan", *TIMES], "one of the arguments --schedule --schedule-file is required"),
        ([*PLAN, *TIMES, "--schedule-file", "x"], "not allowed with argument --schedule"),
        ([*PLAN, *TIMES, "--bogus"], "unrecognized arguments: --bogus"),
        ([*PLAN, *TIMES, "--form", "json"], "unrecognized arguments: --form json"),
        ([*PLAN, *TIMES, "--format", "pdf"], "invalid choice: 'pdf'"),
        ([*PLAN, *TIMES, "--num-ranks", "two"], "invalid int value: 'two'"),
        ([*PLAN, *TIMES, "--num-ranks", "0"], "num_ranks must be 1 or more; got 0"),
        (
            [*PLAN, *TIMES, "--schedule", "zb-9"],
            "unknown schedule 'zb-9'; choose one of 1f1b, interleaved-1f1b, breadth-first, zb-h1",
        ),
        ([*PLAN[:5], *TIMES], "--num-microbatches is required without --config or --schedule-file; it is missing"),
        (PLAN, "--forward-ms is required without --costs or --config; it is missing"),
        ([*PLAN, *TIMES, "--forward-ms", "-3"], "--forward-ms must be a finite number, 0 or above; got -3.0"),
        (
            [*PLAN, *TIMES, "--schedule", "zb-auto", "--forward-ms", "1e-320"],
            "some figures are too large or too small to plan with",
        ),
        ([*PLAN, *TIMES, "--comm-ms", "nan"], "--comm-ms must be a finite number, 0 or above; got nan; give such"),
        (
            [*PLAN, *TIMES, "--message-ms", "-1"],
            "--message-ms must be a finite number, 0 or above; got -1.0; give such",
        ),
        (
            [*PLAN, *TIMES, "--message-ms", "nan"],
            "--message-ms must be a finite number, 0 or above; got nan; give such",
        ),
        ([*PLAN, *TIMES, "--activation-memory", "0"], "activation memory must be above 0"),
        ([*PLAN, *TIMES, "--costs", "none.json"], "--costs gives the times of all passes; leave out --forward-ms"),
        ([*PLAN, "--costs", "none.json"], "cannot read the costs file none.json: No such file or directory"),
        (["plan", "--schedule-file", "none.json", *TIMES], "cannot read the schedule file none.json"),
        (
            [*PLAN, *TIMES, "--memory-limit", "8"],
            "a memory limit is written like 1p (the peak of 1F1B) or 60GiB",
        ),
        ([*PLAN, *TIMES, "--memory-limit", "0p"], "a memory limit is written like 1p"),
        ([*PLAN, *TIMES, "--memory-limit", "1GiB"], "needs activation memory in bytes; give --activation-memory"),
        ([*PLAN, *TIMES, "--memory-limit", "0.4p"], "room for one microbatch, 1 on rank 0; got 0.8"),
        ([*PLAN, *TIMES, "--placement", "vee"], "--placement applies only to zb-auto"),
        ([*PLAN, *TIMES, "--gpu", "h100"], "--gpu requires --config; give --config as well"),
        ([*PLAN, *TIMES, "--config", "x.yaml"], "--config estimates times and memory; leave out --forward-ms"),
        ([*PLAN, "--config", "none.yaml"], "cannot be read: none.yaml"),
        (["compare", "--num-ranks", "2", *TIMES], "--num-microbatches is required"),
        (["dry-run"], "a run needs --num-layers"),
        (["dry-run", "--gpu-memory", "8", "--", *JOB], "--gpu-memory needs a size in bytes"),
    ],
)
def test_invalid_input_prints_one_sentence_and_exits_with_2(
    capsys: Capture, arguments: list[str], message: str
) -> None:
    error = fails(capsys, *arguments)
    assert message in error
    assert error.count("\n") == 1


def test_rank_count_must_match_the_schedule_file(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(run(capsys, *PLAN, *TIMES, "--format", "json"))
    error = fails(capsys, "plan", "--schedule-file", str(path), "--num-ranks", "3", *TIMES)
    assert "--num-ranks must equal the value in the schedule file, 2; got 3; leave it out" in error


def test_invalid_schedule_file_shows_the_grid(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(run(capsys, *PLAN, *TIMES, "--format", "json").replace('"1W0", ', ""))
    error = fails(capsys, "plan", "--schedule-file", str(path), *TIMES)
    assert error.splitlines()[0] == f"zero-bubble plan: schedule file {path}: zb-h1: rank 1 must run 1W0; it is missing"
    assert ">1W0<" in error


def test_closed_output_pipe_is_not_an_error() -> None:
    command = [sys.executable, "-m", "megatron.zero_bubble", "plan", "--schedule", "zb-h2", "--format", "json"]
    command += ["--num-ranks", "16", "--num-microbatches", "600", *TIMES]
    # Unbuffered output would hide the closed pipe: the interpreter does not retry its one short write.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 0


def test_list_imports_no_other_command_and_no_torch() -> None:
    code = "import sys; from megatron.zero_bubble.__main__ import main; main(['list']); print(*sys.modules, sep='\\n')"
    modules = set(subprocess.check_output([sys.executable, "-c", code], text=True).splitlines())
    assert modules & {"torch", "numpy", "http.server", "megatron.zero_bubble.cli.plan"} == set()


def refused(capsys: Capture, *arguments: str) -> str:
    try:
        code: object = main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    return err


SIZES_AND_TIMES = "--num-ranks 4 --num-microbatches 8 --forward-ms 10 --backward-ms 10 --wgrad-ms 10".split()


@pytest.mark.parametrize("name", ["zb-vv", "ZB-V", "zb_v", "zbv"])
def test_an_unknown_schedule_is_answered_with_the_nearest_and_all_names(capsys: Capture, name: str) -> None:
    err = refused(capsys, "plan", "--schedule", name, *SIZES_AND_TIMES)
    assert err.startswith(f"zero-bubble plan: unknown schedule {name!r}; choose one of 1f1b, ")
    assert err.endswith("zero-pp, or zb-auto; did you mean zb-v?\n")


def test_nothing_is_suggested_for_a_name_like_no_other(capsys: Capture) -> None:
    assert refused(capsys, "plan", "--schedule", "quux", *SIZES_AND_TIMES).endswith("zero-pp, or zb-auto\n")


def test_flags_of_a_job_without_dashes_before_them_are_refused_with_the_remedy(
    capsys: Capture,
) -> None:
    err = refused(capsys, "dry-run", "--num-layers", "8", "--hidden-size", "64")
    assert "unrecognized arguments: --num-layers" in err
    assert err.endswith("--gpus-per-node, and the flags of the training script come last, after a separate --\n")
    assert "the machines are --nodes and --gpus-per-node" in refused(capsys, "advise", "--gpus", "64", "--", "--bf16")
    assert "separate --" not in refused(capsys, "plan", "--schedule", "zb-h1", "--num-layers", "8", *SIZES_AND_TIMES)


def test_list_has_columns(capsys: Capture) -> None:
    assert main(["list"]) == 0
    _, *rows, _ = capsys.readouterr().out.splitlines()
    columns = {
        (row.index("bubble "), row.index("memory "), row.index(recipe.summary))
        for row, recipe in zip(rows, SCHEDULES.values(), strict=True)
    }
    assert len(columns) == 1


@pytest.mark.parametrize(
    ("verb", "words", "expected"),
    [
        (
            "plan",
            "--schedule zb-h1 --forward-ms 0 --backward-ms 0 --wgrad-ms 0",
            "F, B or W must take some time; got 0",
        ),
        ("compare", "--max-chunks 0", "--max-chunks must be from 1 (no interleaved schedules) to 64; got 0"),
        ("compare", "--max-chunks -1", "--max-chunks must be from 1 (no interleaved schedules) to 64; got -1"),
        ("compare", "--offload all", "offloading needs the time of a copy to host memory; got none with offload all"),
    ],
)
def test_flags_without_a_meaning_are_refused(capsys: Capture, verb: str, words: str, expected: str) -> None:
    given = dict(zip(SIZES_AND_TIMES[::2], SIZES_AND_TIMES[1::2], strict=True))
    asked = words.split()
    given |= dict(zip(asked[::2], asked[1::2], strict=True))
    assert expected in refused(capsys, verb, *(f"{flag}={value}" for flag, value in given.items()))


@pytest.mark.parametrize("schedule", ["zb-v", "zb-h1"])
def test_plan_says_when_1f1b_is_faster(capsys: Capture, schedule: str) -> None:
    """With slow links a V loses to 1F1B, which has half of its messages; ZB-H1 does not."""
    words = "--num-ranks 4 --num-microbatches 2 --forward-ms 1 --backward-ms 1 --wgrad-ms 0.1 --comm-ms 1".split()
    assert main(["plan", "--schedule", schedule, *words]) == 0
    out = capsys.readouterr().out
    assert main(["plan", "--schedule", "1f1b", *words, "--format", "json"]) == 0
    baseline = json.loads(capsys.readouterr().out)["makespan_ms"]
    sentence = f"SLOWER than 1f1b, which takes {baseline:,.1f} ms makespan instead of "
    assert (sentence in out) == (schedule == "zb-v")

"""Tests of a playground that starts from a job: its costs, its own schedule, and the flags to run a plan."""

from __future__ import annotations

import gzip
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from megatron.zero_bubble import PassCosts
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.formats.costs import costs_to_json
from tests.cli.test_playground import ask, drawing, get, refusal
from tests.helpers.playground import playground, without_seconds

Capture = pytest.CaptureFixture[str]
JOB = (
    "--num-layers 16 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --micro-batch-size 1 --bf16 "
    "--global-batch-size 32 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1023 --train-iters 10 --lr 1e-4"
).split()
ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/llama_8b.yaml"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A playground for a job of four ranks with two stages each, and two replicas."""
    with playground("--", *JOB) as at:
        yield at


def job_in(address: str) -> dict[str, Any]:
    """What the page knows of the job."""
    page = get(address, "/")[2].decode()
    (line,) = [line for line in page.splitlines() if line.startswith("const CATALOGUE = ")]
    content = json.loads(line.removeprefix("const CATALOGUE = ").removesuffix(";"))["job"]
    assert isinstance(content, dict)
    return content


def test_flags_of_a_job_give_costs_and_its_own_schedule(address: str, capsys: Capture) -> None:
    assert main(["advise", "--quick", "--format", "json", "--", *JOB]) == 0
    advised = json.loads(capsys.readouterr().out)
    job, own = job_in(address), ask(address, {"schedule": "own", "num-microbatches": "16"})
    assert (job["num_ranks"], job["num_microbatches"]) == (4, 16), "two replicas halve the batch"
    assert job["notes"] == advised["job"]["notes"] and (job["own"], job["same"]) == (
        "interleaved-1f1b",
        "interleaved-1f1b x2",
    )
    assert own["plan"]["makespan_ms"] == advised["job"]["makespan_ms"]
    assert own["plan"]["imbalance"] > 1 and own["memory_gib"]["total"] > own["memory_gib"]["activations"]
    assert (own["command"], own["run"]) == (None, "It is the job's own schedule: add nothing.")


def test_rows_of_a_job_say_what_to_add_and_leave_out(address: str, capsys: Capture) -> None:
    assert main(["advise", "--quick", "--format", "json", "--", *JOB]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["advice"]}
    virtual = "--num-virtual-stages-per-pipeline-rank"
    for asked, flags in (
        ({"schedule": "zb-h1"}, ["--zero-bubble-schedule", "zb-h1"]),
        ({"schedule": "zb-v", "equal-passes": ""}, ["--zero-bubble-schedule", "zb-v"]),
        ({"schedule": "zb-v"}, ["--zero-bubble-schedule", "plan.json"]),
    ):
        answer = ask(address, {**asked, "num-microbatches": "16"})
        assert answer["run"].endswith(f"add to the job: {' '.join(flags)}; leave out {virtual}")
        if answer["plan"]["schedule"] in rows and "plan.json" not in flags:
            row = rows[answer["plan"]["schedule"]]
            assert (row["makespan_ms"], row["leave_out"]) == (answer["plan"]["makespan_ms"], [virtual])
    inside = ask(
        address, {"schedule": "zb-interleaved", "equal-passes": "", "num-chunks": "2", "num-microbatches": "16"}
    )
    assert "leave out" not in inside["run"] and inside["run"].endswith("zb-interleaved --zero-bubble-num-chunks 2")
    plain = ask(address, {"schedule": "1f1b", "num-microbatches": "16"})
    assert plain["run"] == f"It is Megatron's own schedule: add nothing; leave out {virtual}"


def test_saved_plan_runs_in_the_job(address: str, tmp_path: Path, capsys: Capture) -> None:
    asked = {"schedule": "zb-v", "num-microbatches": "16", "memory-limit": "1p"}
    status, kind, body = get(address, f"/file?{urlencode(asked)}")
    assert (status, kind) == (200, "application/json")
    (tmp_path / "plan.json").write_bytes(gzip.decompress(body))
    flags = [word for word in JOB if word != "--num-virtual-stages-per-pipeline-rank"]
    flags.remove("2")
    file = ["--zero-bubble-schedule-file", str(tmp_path / "plan.json")]
    assert main(["dry-run", "--megatron-lm", "--nodes", "1", "--gpu", "h100", "--", *flags, *file]) == 0
    ms = ask(address, asked)["plan"]["makespan_ms"]
    assert f"{ms:,.1f} ms" in capsys.readouterr().out


def test_number_of_microbatches_can_change(address: str) -> None:
    for count in (8, 12):
        asked = {"schedule": "own", "num-microbatches": str(count)}
        first = drawing(address, asked)["order"][0]
        assert sum("F" in text for text in first) == 2 * count, "two forwards per microbatch and rank"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"forward-ms": "3"}, "got 'forward-ms'; leave it out"),
        ({"num-ranks": "2"}, "got 'num-ranks'; leave it out"),
        ({"costs": "/etc/passwd"}, "got 'costs'; leave it out"),
        ({"num-microbatches": "257"}, "the playground allows at most 256 num-microbatches; got 257"),
        ({"num-microbatches": "0"}, "--num-microbatches must be 1 or more; got 0"),
    ],
)
def test_flags_that_the_job_gives_are_rejected(address: str, asked: dict[str, str], sentence: str) -> None:
    status, said = refusal(address, f"/plan?{urlencode({'schedule': 'zb-h1', 'num-microbatches': '8'} | asked)}")
    assert status == 400 and sentence in said


@pytest.mark.parametrize("source", ["config", "costs"])
def test_files_give_costs_and_the_command_prints_the_same(source: str, tmp_path: Path, capsys: Capture) -> None:
    if source == "config":
        file = str(ROOT / CONFIG)
    else:
        file = str(tmp_path / "costs.json")
        costs = PassCosts(tuple(range(10, 14)), tuple(range(11, 15)), tuple(range(8, 12)), comm_ms=0.5)
        (tmp_path / "costs.json").write_text(costs_to_json(costs))
    with playground(f"--{source}", file) as address:
        job = job_in(address)
        assert (job["source"], job["num_ranks"], job["own"]) == (file, 4, None)
        asked = {"schedule": "zb-h1", "num-microbatches": "8", "memory-limit": "1p"}
        answer = ask(address, asked)
        words = shlex.split(answer["command"])
        assert main([*words[1:], "--format", "json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        plan = answer["plan"] | {"order": drawing(address, asked)["order"]}
        assert without_seconds(plan) == {key: printed[key] for key in without_seconds(plan)}
        assert answer["run"] == "To run it, add to the job: --zero-bubble-schedule zb-h1"
        assert (answer["memory_gib"] is not None) == (source == "config")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--config nowhere.yaml", "the configuration file cannot be read: nowhere.yaml"),
        ("--costs nowhere.json", "cannot read the costs file nowhere.json"),
        ("--config a.yaml --costs b.json", "--config and --costs both give the costs; leave one of them out"),
        ("--nodes 2", "--nodes applies only to the flags of a job after --; give them, or leave it out"),
        ("--num-ranks 4", "--num-ranks applies only to --costs and --config"),
        ("--config a.yaml -- --num-layers 4", "--config does not apply to a job's own flags after --"),
        (f"-- {' '.join(JOB)} --tensor-model-parallel-size 3", "3"),
        (f"--config {ROOT / 'configs/llama_70b.yaml'} --num-ranks 80", "at most 64 num-ranks; got 80 in"),
    ],
)
def test_bad_jobs_are_refused_in_one_sentence(words: str, sentence: str, capsys: Capture) -> None:
    assert main(["playground", "--no-browser", *words.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("zero-bubble playground: ") and sentence in err and err.count("\n") == 1

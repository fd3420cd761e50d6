"""Tests of ``--zero-bubble-schedule auto``: what it decides from the flags of a job, and what it remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.cli import deciding
from megatron.zero_bubble.cli.deciding import COSTS, DECISION, decided
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.job.changes import Pipeline

JOB = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --pipeline-model-parallel-size 2 --bf16 --train-iters 10 --lr 1e-4 --vocab-size 32000 "
    "--tokenizer-type NullTokenizer --mock-data --untie-embeddings-and-output-weights --zero-bubble-device cpu"
).split()
FEW, MANY = ["--global-batch-size", "4"], ["--global-batch-size", "1024"]
AUTO = ["--zero-bubble-schedule", "auto"]
LIMIT = "--zero-bubble-memory-limit"
POSITIONS = ["--max-position-embeddings", "16384"]
WORLD = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide among schedules by name, which is faster."""
    monkeypatch.setattr(Pipeline, "changes", Pipeline.named_changes)


def test_other_schedules_pass_through() -> None:
    for own in ([], ["--zero-bubble-schedule", "zb-h1"]):
        assert decided([*JOB, *FEW, *own], {}) == ([*JOB, *FEW, *own], [])


@pytest.mark.usefixtures("named")
def test_few_microbatches_get_a_placement_to_search_on() -> None:
    flags, (line,) = decided([*JOB, *FEW, *AUTO, "--zero-bubble-exact"], WORLD)
    added = flags[len(JOB) + 3 :]
    assert added[:3] == ["--zero-bubble-schedule", "zb-auto", "--zero-bubble-placement"]
    assert "--zero-bubble-keep-faster" in added and "--zero-bubble-exact" in flags
    assert line.startswith("auto: --zero-bubble-schedule zb-auto") and "of the time of the passes expected" in line


def test_interleaved_stages_without_a_bubble_stay() -> None:
    """512 microbatches per rank: nothing is worth a change."""
    even = [*JOB, *MANY, "--num-virtual-stages-per-pipeline-rank", "4", "--vocab-size", "128"]
    assert decided([*even, *AUTO], WORLD)[0] == even
    exact = [*even, "--zero-bubble-exact"]  # which needs a schedule of this package
    assert decided([*exact, *AUTO], WORLD)[0] == [*exact, "--zero-bubble-schedule", "interleaved-1f1b"]


def test_experts_get_pairs() -> None:
    experts = "--num-experts 32 --moe-ffn-hidden-size 512 --moe-router-topk 8 --expert-model-parallel-size 4 "
    experts += "--moe-token-dispatcher-type alltoall --disable-bias-linear --global-batch-size 64 --vocab-size 1000"
    flags, _ = decided([*JOB, *experts.split(), *AUTO], {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "0"})
    assert flags[-1] == "--zero-bubble-overlap-experts" and "zb-auto" not in flags


@pytest.mark.full
def test_a_large_vocabulary_is_divided_unless_bits_must_stay() -> None:
    large = [*JOB, *FEW, "--vocab-size", "256000"]
    flags, _ = decided([*large, *AUTO], WORLD)
    assert "--zero-bubble-vocabulary-parallel" in flags and "--zero-bubble-keep-faster" in flags
    exact, _ = decided([*large, "--zero-bubble-exact", *AUTO], WORLD)
    assert "--zero-bubble-vocabulary-parallel" not in exact and "zb-auto" in exact


def test_one_microbatch_is_cut_into_slices() -> None:
    flags, _ = decided([*JOB, "--global-batch-size", "1", "--seq-length", "16384", *POSITIONS, *AUTO], WORLD)
    assert "--zero-bubble-slice-ends" in flags and "zb-auto" in flags


def test_layers_are_laid_out_by_cost() -> None:
    uneven = ["--decoder-first-pipeline-num-layers", "6", "--vocab-size", "1000"]
    flags, _ = decided([*JOB, *FEW, *uneven, *AUTO], WORLD)
    assert "--pipeline-model-parallel-layout" in flags and "--decoder-first-pipeline-num-layers" not in flags


def test_a_memory_limit_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def stays(options: Any) -> str:
        asked.append(options.memory_limit)
        row = {
            "name": "zb-v",
            "flags": [*AUTO[:1], "zb-v"],
            "leave_out": [],
            "gain": 0.2,
            "bits": "",
            "placement": "vee",
        }
        job = {"idle": {}, "schedule": "1f1b"}
        return json.dumps({"job": job, "advice": [row], "best": 1, "worth": 0.01, "worth_it": True})

    monkeypatch.setattr(deciding, "advise", stays)
    free, _ = decided([*JOB, *FEW, *AUTO], WORLD)
    limited, _ = decided([*JOB, *FEW, *AUTO, LIMIT, "0.5p"], WORLD)
    assert free[free.index(LIMIT) + 1] == "auto" and limited[limited.index(LIMIT) + 1] == "0.5p"
    assert asked == [None, "0.5p"]


@pytest.mark.usefixtures("named")
def test_a_run_that_saves_records_its_costs(tmp_path: Path) -> None:
    job = [*JOB, *FEW, "--vocab-size", "1000", "--save", str(tmp_path)]
    flags, (_, line) = decided([*job, *AUTO], WORLD)
    assert flags[-2:] == ["--zero-bubble-record-costs", str(tmp_path / COSTS)] and str(tmp_path / COSTS) in line
    again, _ = decided([*job, *AUTO], WORLD)
    assert again == flags
    (tmp_path / DECISION).unlink()
    own, _ = decided([*job, *AUTO, "--zero-bubble-record-costs", str(tmp_path / "mine.json")], WORLD)
    assert own.count("--zero-bubble-record-costs") == 1


@pytest.mark.usefixtures("named")
def test_a_decision_is_kept_next_to_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = [*JOB, *FEW, "--save", str(tmp_path / "saved")]
    other, _ = decided([*job, *AUTO], {**WORLD, "RANK": "1"})
    assert not (tmp_path / "saved").exists(), "the first rank writes"
    first, _ = decided([*job, *AUTO], WORLD)
    assert first == other

    def refused(*_: Any) -> Any:
        raise AssertionError("the decision is read")

    monkeypatch.setattr(deciding, "_advice", refused)
    again, (line, *_) = decided([*job, *AUTO], {**WORLD, "RANK": "1"})
    assert again == first and str(tmp_path / "saved" / DECISION) in line
    (tmp_path / "saved" / DECISION).write_text("{}")
    with pytest.raises(UserError, match="is not a decision of --zero-bubble-schedule auto"):
        decided([*job, *AUTO], WORLD)


@pytest.mark.usefixtures("named")
def test_costs_of_the_last_run_decide(tmp_path: Path) -> None:
    """Passes of the last run, in which W takes no time, so that splitting backwards gains nothing."""
    costs = {"forward_ms": [1.0] * 2, "backward_ms": [2.0] * 2, "wgrad_ms": [0.0] * 2, "comm_ms": 5.0}
    (tmp_path / COSTS).write_text(json.dumps(costs))
    with_costs, _ = decided([*JOB, *FEW, "--load", str(tmp_path), *AUTO], WORLD)
    (tmp_path / DECISION).unlink()
    (tmp_path / COSTS).unlink()
    without, _ = decided([*JOB, *FEW, "--load", str(tmp_path), *AUTO], WORLD)
    assert with_costs != without


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--zero-bubble-placement", "vee"], "auto decides what --zero-bubble-placement does; got"),
        (["--zero-bubble-vocabulary-parallel", "1"], "auto decides what --zero-bubble-vocabulary-parallel does"),
        (["--num-layers", "3"], "could not decide: --num-layers must be divisible"),
    ],
)
def test_errors_are_sentences(more: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        decided([*JOB, *FEW, *more, *AUTO], WORLD)

"""Tests of ``--zero-bubble-schedule auto``: what it decides from the flags of a job, and what it remembers."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.cli import deciding
from megatron.zero_bubble.cli.advise import Advised
from megatron.zero_bubble.cli.deciding import COSTS, DECISION, decided
from megatron.zero_bubble.cli.job_as_is import read_job
from megatron.zero_bubble.cli.machine import Gpu
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.change import AdviceRow, need_of_plan
from megatron.zero_bubble.planning.job.changes import JobChanges
from megatron.zero_bubble.planning.worth import Advice

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
    monkeypatch.setattr(JobChanges, "changes", JobChanges.named_changes)


def test_other_schedules_pass_through() -> None:
    for own in ([], ["--zero-bubble-schedule", "zb-h1"]):
        assert decided([*JOB, *FEW, *own], {}) == ([*JOB, *FEW, *own], [])


@pytest.mark.usefixtures("named")
def test_few_microbatches_get_a_placement_to_search_on() -> None:
    flags, (line,) = decided([*JOB, *FEW, *AUTO, "--zero-bubble-exact"], WORLD)
    added = flags[len(JOB) + 3 :]
    assert added[:2] == ["--zero-bubble-schedule", "zb-auto"]
    assert {"--zero-bubble-keep-faster", "--zero-bubble-placement"} <= {*added} and "--zero-bubble-exact" in flags
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
    assert "--zero-bubble-overlap-experts" in flags and "zb-auto" not in flags


@pytest.mark.full
def test_a_large_vocabulary_is_divided_unless_bits_must_stay() -> None:
    large = [*JOB, *FEW, "--vocab-size", "256000"]
    flags, _ = decided([*large, *AUTO], WORLD)
    assert "--zero-bubble-vocabulary-parallel" in flags and "--zero-bubble-keep-faster" in flags
    exact, _ = decided([*large, "--zero-bubble-exact", *AUTO], WORLD)
    assert "--zero-bubble-vocabulary-parallel" not in exact and "zb-auto" in exact


def test_one_microbatch_is_cut_into_slices() -> None:
    flags, _ = decided([*JOB, "--global-batch-size", "1", "--seq-length", "16384", *POSITIONS, *AUTO], WORLD)
    assert "--zero-bubble-slices" in flags and "zb-auto" in flags


def test_layers_are_laid_out_by_cost() -> None:
    uneven = ["--decoder-first-pipeline-num-layers", "6", "--vocab-size", "1000"]
    flags, _ = decided([*JOB, *FEW, *uneven, *AUTO], WORLD)
    assert "--pipeline-model-parallel-layout" in flags and "--decoder-first-pipeline-num-layers" not in flags


def test_a_memory_limit_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def stays(options: argparse.Namespace, argv: Sequence[str]) -> Advised:
        asked.append(options.memory_limit)
        return Asked("zb-v")(options, argv)

    monkeypatch.setattr(deciding, "advised", stays)
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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "must have the key setup"),
        ({"setup": "zb-v", "adds": [], "drops": []}, "setup must be an object"),
        ({"setup": {"placing": "zb-v"}, "adds": [], "drops": []}, "a setup decides schedule, .*; got placing"),
        (
            {"setup": {"schedule": "zb-v", "exact": True}, "adds": [], "drops": []},
            "only what auto .* got --zero-bubble-e",
        ),
        ({"setup": {}, "adds": "--bf16", "drops": []}, "adds must be a list of strings"),
        ({"setup": {}, "adds": ["--lr", "9"], "drops": []}, "only what auto decides; got --lr"),
        ({"setup": {}, "adds": [], "drops": ["--save", "--bf16"]}, "only what auto decides; got --save"),
        ({"setup": {}, "adds": ["zb-v"], "drops": []}, "only what auto decides; got zb-v"),
        ({"setup": {}, "adds": [], "drops": [], "facts": 3}, "facts must be an object of facts"),
    ],
)
def test_a_file_without_a_decision_is_refused(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    (tmp_path / DECISION).write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"auto {tmp_path / DECISION}: .*{words}.*remove the file to decide again"):
        decided([*JOB, *FEW, "--save", str(tmp_path), *AUTO], WORLD)


class Asked:
    """Stands in for the advice of ``zero-bubble advise``: one schedule by name; counts how often it is asked."""

    def __init__(self, name: str) -> None:
        self.name, self.times = name, 0

    def __call__(self, options: argparse.Namespace, argv: Sequence[str]) -> Advised:
        self.times += 1
        job = read_job(options, argv)
        pipeline = JobChanges(job.today.timeline.schedule.placement, job.costs, math.inf, 1e6)
        change = next(change for change in pipeline.named_changes() if change.name == self.name)
        plan = answer(change.question)
        row = AdviceRow(change, plan, need_of_plan(plan), True, 0.2, None, change.setup)
        return Advised(job, Advice(job.today, (row,), job.objective, 0.01), None, math.inf)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked("zb-v")
    monkeypatch.setattr(deciding, "advised", found)
    return found


@pytest.mark.parametrize(
    ("more", "world", "words"),
    [
        (["--num-layers", "16"], 2, "layers: 8 there, 16 here"),
        (["--hidden-size", "512"], 2, "hidden size: 1024 there, 512 here"),
        (["--ffn-hidden-size", "512"], 2, "hidden size of an MLP: 4096 there, 512 here"),
        (["--swiglu"], 2, "gated MLPs: no there, yes here"),
        (["--num-attention-heads", "8"], 2, "attention heads: 16 there, 8 here"),
        (["--group-query-attention", "--num-query-groups", "2"], 2, "groups of queries: 16 there, 2 here"),
        (["--kv-channels", "32"], 2, "size of a head: 64 there, 32 here"),
        (["--vocab-size", "1000"], 2, "vocabulary: 32000 there, 1000 here"),
        (["--num-experts", "4"], 2, "experts: unknown there, 4 here"),
        (["--seq-length", "1024"], 2, "sequence length: 2048 there, 1024 here"),
        (["--micro-batch-size", "2"], 2, "sequences of a microbatch: 1 there, 2 here"),
        (["--recompute-activations"], 2, "recomputation: none there, selective, core_attn here"),
        (["--attention-backend", "unfused"], 2, "attention kernel: flash there, unfused here"),
        (["--fp8-format", "hybrid"], 2, "precision: bf16 there, bf16 fp8 here"),
        (["--tensor-model-parallel-size", "2"], 4, "tensor-parallel ranks: 1 there, 2 here"),
        (["--context-parallel-size", "2"], 4, "context-parallel ranks: 1 there, 2 here"),
        (["--pipeline-model-parallel-size", "4"], 4, "pipeline ranks: 2 there, 4 here"),
        ([], 4, "data-parallel replicas: 1 there, 2 here"),
        (["--num-virtual-stages-per-pipeline-rank", "2"], 2, "stages per rank: 1 there, 2 here"),
        (["--decoder-first-pipeline-num-layers", "3"], 2, "layers per stage: 4 x2 there, 3, 5 here"),
        (["--global-batch-size", "64"], 2, "global batch: 4 there, 64 here"),
        (["--use-distributed-optimizer"], 2, "optimizer: adam there, adam, distributed here"),
        (["--zero-bubble-exact"], 2, "exact sums: no there, yes here"),
        ([LIMIT, "0.5p"], 2, "memory limit: auto there, 0.5p here"),
        (["--zero-bubble-nccl-ctas", "4"], 2, "other flags of this package:  there, nccl_ctas 4 here"),
    ],
)
def test_another_job_decides_again(tmp_path: Path, asked: Asked, more: list[str], world: int, words: str) -> None:
    job = [*JOB, *FEW, "--save", str(tmp_path), "--load", str(tmp_path)]
    decided([*job, *AUTO], WORLD)
    decided([*job, *AUTO], WORLD)
    assert asked.times == 1, "the same job keeps its decision"
    other = {**WORLD, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    _, (line, *_) = decided([*job, *more, *AUTO], other)
    assert asked.times == 2
    assert line.startswith(f"auto: {tmp_path / DECISION} decided for another job (") and words in line
    decided([*job, *more, *AUTO], other)
    assert asked.times == 2, "the new decision is kept"


def test_another_gpu_decides_again(tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    job = [*JOB, *FEW, "--save", str(tmp_path), "--zero-bubble-device", "auto", *AUTO]
    for gpu, times in ((Gpu("h100", "79.6GiB"), 1), (Gpu("h100", "79.6GiB"), 1), (Gpu("h200", "140.4GiB"), 2)):
        monkeypatch.setattr(deciding, "gpu_here", lambda own=gpu: own)
        _, lines = decided(job, WORLD)
        assert asked.times == times
    assert "(GPU: h100 there, h200 here; memory of a GPU: 79.6GiB there, 140.4GiB here)" in lines[0]


def test_new_costs_decide_again(tmp_path: Path, asked: Asked) -> None:
    job = [*JOB, *FEW, "--save", str(tmp_path), *AUTO]
    decided(job, WORLD)
    for times, forward in ((2, 1.0), (3, 2.0)):
        times_of = {"forward_ms": forward, "backward_ms": 1.0, "wgrad_ms": 1.0}
        (tmp_path / COSTS).write_text(json.dumps(times_of))
        _, lines = decided(job, WORLD)
        assert asked.times == times and "(costs: " in lines[0]
        assert lines[1] == f"auto: {tmp_path / COSTS} does not say of which job it is, and is taken as of this one"


def test_a_decision_that_the_job_refuses_is_made_again(tmp_path: Path, asked: Asked) -> None:
    job = [*JOB, *FEW, "--save", str(tmp_path)]
    decided([*job, *AUTO], WORLD)
    content = json.loads((tmp_path / DECISION).read_text())
    (tmp_path / DECISION).write_text(json.dumps({**content, "setup": {"schedule": "nonsense"}}))
    flags, (line, *_) = decided([*job, *AUTO], WORLD)
    assert "decided for what this job refuses, so this is decided again: " in line and "nonsense" not in flags


@pytest.mark.parametrize("facts", [{}, {"facts": {"num_layers": 8}}], ids=["without facts", "with facts"])
def test_decisions_of_older_versions_are_made_again(tmp_path: Path, asked: Asked, facts: dict[str, Any]) -> None:
    """They have the words of flags in the place of a setup."""
    older = {"flags": ["--zero-bubble-schedule", "zb-h2"], "leave_out": [], **facts}
    (tmp_path / DECISION).write_text(json.dumps(older))
    flags, (line, *_) = decided([*JOB, *FEW, "--save", str(tmp_path), *AUTO], WORLD)
    assert "does not say for which job it decided, so this is decided again" in line and "zb-h2" not in flags


def test_nothing_is_written_to_the_folder_of_load(tmp_path: Path, asked: Asked) -> None:
    """The decision of the job that is loaded holds if the job is the same; it is then kept in ``--save``."""
    loaded, saved = tmp_path / "loaded", tmp_path / "saved"
    loaded.mkdir()
    decided([*JOB, *FEW, "--load", str(loaded), *AUTO], WORLD)
    assert not list(loaded.iterdir())
    decided([*JOB, *FEW, "--save", str(loaded), *AUTO], WORLD)
    times = asked.times
    _, lines = decided([*JOB, *FEW, "--load", str(loaded), "--save", str(saved), *AUTO], WORLD)
    assert asked.times == times and f"as {loaded / DECISION} says" in lines[0]
    assert (saved / DECISION).read_text() == (loaded / DECISION).read_text()
    decided([*JOB, "--global-batch-size", "8", "--load", str(loaded), "--save", str(tmp_path / "other"), *AUTO], WORLD)
    assert asked.times == times + 1


def test_a_folder_that_is_not_writable_is_a_remark(tmp_path: Path, asked: Asked) -> None:
    (tmp_path / "file").write_text("")
    flags, lines = decided([*JOB, *FEW, "--save", str(tmp_path / "file" / "saved"), *AUTO], WORLD)
    assert "zb-auto" in flags and "cannot be written" in lines[0] and "decides again" in lines[0]


@pytest.mark.usefixtures("named")
def test_costs_of_the_last_run_decide(tmp_path: Path) -> None:
    """Passes of the last run, in which W takes no time, so that splitting backwards gains nothing."""
    costs = {"forward_ms": [1.0] * 2, "backward_ms": [2.0] * 2, "wgrad_ms": [0.0] * 2, "comm_ms": 5.0}
    (tmp_path / COSTS).write_text(json.dumps(costs))
    with_costs, _ = decided([*JOB, *FEW, "--load", str(tmp_path), *AUTO], WORLD)
    (tmp_path / COSTS).unlink()
    without, _ = decided([*JOB, *FEW, "--load", str(tmp_path), *AUTO], WORLD)
    assert with_costs != without


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"forward_ms": [1, 1, 1], "facts": {"hidden_size": 1024}}, "one figure for each of the 2 stages; got 3"),
        ({"forward_ms": 1, "facts": {"hidden_size": 64}}, "of another job: hidden size: 64 there, 1024 here"),
        ({"forward_ms": 1, "wgrad_ms": "x"}, "wgrad_ms must be"),
    ],
)
def test_costs_of_other_jobs_are_not_used(
    tmp_path: Path, costs: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobChanges, "changes", JobChanges.named_changes)
    estimated, _ = decided([*JOB, *FEW, *AUTO], WORLD)
    same = dict.fromkeys(("backward_ms", "wgrad_ms"), costs["forward_ms"])
    (tmp_path / COSTS).write_text(json.dumps({**same, **costs}))
    flags, lines = decided([*JOB, *FEW, "--load", str(tmp_path), *AUTO], WORLD)
    assert lines[0].count(str(tmp_path / COSTS)) == 1 and " not used" in lines[0] and words in lines[0]
    assert len(lines) == 2
    assert [word for word in flags if word not in ("--load", str(tmp_path))] == estimated


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

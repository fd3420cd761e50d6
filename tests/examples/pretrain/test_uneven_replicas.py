"""Whole runs on documents of different lengths, whose replicas have equal work."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpus import write_documents

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import read_costs_file
from megatron.zero_bubble.core.formats.trace import read_trace_file
from megatron.zero_bubble.core.ir import Kind
from megatron.zero_bubble.planning.job.arguments.checks import check
from megatron.zero_bubble.planning.job.arguments.parser import parse
from tests.examples.pretrain.test_faults import BACKWARD, check_survivors, flags
from tests.helpers.launch import Death, run_training
from tests.helpers.parity import BASE_FLAGS, Layout
from tests.helpers.ranks import RankPool
from tests.helpers.training import SMALL, losses, train

BALANCED = "--zero-bubble-balance-microbatches --calculate-per-token-loss --pipeline-model-parallel-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@pytest.mark.parametrize(
    "more",
    [
        f"--mock-data --zero-bubble-schedule zb-v {OVERLAP} --attention-dropout 0.1 --hidden-dropout 0.1",
        pytest.param("--mock-data --zero-bubble-schedule zb-h1 --bf16", marks=pytest.mark.full),
        pytest.param(
            "--mock-data --zero-bubble-schedule zero-pp --num-virtual-stages-per-pipeline-rank 2 "
            "--zero-bubble-shard-weights --zero-bubble-shard-transport on-demand --use-distributed-optimizer",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_resumed_run_equals_the_whole_run(ranks: RankPool, tmp_path: Path, more: str) -> None:
    job = f"{BALANCED} --global-batch-size 11 --eval-interval 2 --eval-iters 1 --train-iters 4 {more}"
    whole = train(ranks, 4, job, tmp_path / "whole")
    cut = train(ranks, 4, f"{job} --save {tmp_path}/saved --exit-interval 2", tmp_path / "cut")
    resumed = train(ranks, 4, f"{job} --load {tmp_path}/saved", tmp_path / "resumed")
    assert list(losses(whole)) == list(range(1, 5))
    assert {**losses(cut), **losses(resumed)} == losses(whole)
    assert {**losses(cut, "evaluation"), **losses(resumed, "evaluation")} == losses(whole, "evaluation")
    counts = {line["num_microbatches"] for line in whole if line["kind"] == "train"}
    assert len(counts) > 1, "the number of microbatches must differ between iterations"


def test_one_replica_has_the_losses_of_two(ranks: RankPool, tmp_path: Path) -> None:
    """Both train the same samples in every iteration, on a text with documents of very different lengths."""
    texts = [b"the quick brown fox jumps over the lazy dog. " * (1 + number % 4) for number in range(60)]
    write_documents(str(tmp_path / "text"), [text[: 7 + 5 * number] for number, text in enumerate(texts)])
    job = f"{BALANCED} --data-path {tmp_path}/text --split 90,10 --eval-iters 1 --seq-length 64 --train-iters 4"
    job += " --global-batch-size 9 --lr 1e-2 --zero-bubble-schedule zb-h1 --attention-dropout 0 --hidden-dropout 0"
    lines = train(ranks, 4, f"{job} --zero-bubble-log-bubble --log-interval 2", tmp_path / "two")
    assert [0.0 <= line["planned"] < 1.0 for line in lines if line["kind"] == "bubble"] == [True, True]
    two = losses(lines)
    one = losses(train(ranks, 2, job, tmp_path / "one"))
    assert two.keys() == one.keys()
    for iteration, (loss, norm, *others) in two.items():
        assert (loss, norm) == pytest.approx(one[iteration][:2], rel=2e-5)
        assert others == list(one[iteration][2:])
    assert two[4][0] < 0.9 * two[1][0]


@pytest.mark.full
def test_recorded_passes_are_compared_by_the_lengths_of_their_samples(ranks: RankPool, tmp_path: Path) -> None:
    """Costs are those of a sequence of --seq-length tokens; in the plan of the iteration, the passes of a stage take as
    long in all as they were measured.
    """
    job = f"{BALANCED} --mock-data --global-batch-size 24 --train-iters 3 --zero-bubble-schedule zb-v --seq-length 64"
    job += f" --zero-bubble-trace {tmp_path}/trace --zero-bubble-trace-iterations 3"
    train(ranks, 4, f"{job} --zero-bubble-record-costs {tmp_path}/costs.json", tmp_path / "run")
    recording = read_trace_file(tmp_path / "trace" / "trace.json")
    assert recording.sequence == 64
    planned_timeline, timeline = recording.compared(3).planned, recording.traces[3].timeline
    loads = timeline.loads
    assert max(load.tokens for load in loads) <= 64 * 2 and len({load.tokens for load in loads}) > 1
    planned, measured = (
        {
            (stage, kind): sum(
                end - start for row in of.spans for p, start, end in map(of.computing, row) if p[:2] == (stage, kind)
            )
            for stage in range(4)
            for kind in (Kind.F, Kind.B, Kind.W)
        }
        for of in (planned_timeline, timeline)
    )
    assert planned == pytest.approx(measured, rel=1e-3)
    file = read_costs_file(tmp_path / "costs.json")
    assert file.facts["gpu"] == "cpu" and file.facts["sequence_length"] == 64
    assert file.tokens is not None and file.tokens.sequence == 64
    assert file.figures["forward_ms"] == pytest.approx(recording.costs.forward_ms, rel=1e-3)


@pytest.mark.full
def test_a_killed_replica_ends_the_run(tmp_path: Path) -> None:
    more = ["--zero-bubble-balance-microbatches", "--calculate-per-token-loss", "--micro-batch-size", "1"]
    words = flags(Layout(2, data=2), 4, *more)
    check_survivors(run_training(4, words, tmp_path, Death(3, BACKWARD, call=6)), 3)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("", "balanced microbatches need calculate_per_token_loss=True"),
        (
            "--calculate-per-token-loss --zero-bubble-offload auto",
            "balance-microbatches and --zero-bubble-offload auto",
        ),
        ("--calculate-per-token-loss --global-batch-size 1", "one document or more per data-parallel replica, got 1"),
    ],
)
def test_unsupported_jobs_are_refused(more: str, what: str) -> None:
    schedule = "" if "--zero-bubble-schedule" in more else "--zero-bubble-schedule zb-h1"
    job = f"{Layout(2, data=2).flags(4)} {schedule} --zero-bubble-balance-microbatches {more}"
    with pytest.raises(UserError, match=what):
        check(parse([*BASE_FLAGS.split(), *job.split()]), 4)


def test_several_data_sets_are_refused(tmp_path: Path) -> None:
    job = f"{SMALL} {BALANCED} --zero-bubble-schedule zb-h1 --data-path {tmp_path}/a {tmp_path}/b"
    with pytest.raises(UserError, match="reads the documents of one data set per split"):
        check(parse(job.split()), 4)

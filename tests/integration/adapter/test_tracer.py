"""Tests of ``--zero-bubble-trace`` in our training loop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import estimate
from megatron.zero_bubble.core.formats.costs import read_costs_file
from megatron.zero_bubble.core.formats.trace import read_trace_file
from megatron.zero_bubble.core.ir.collectives import Collective, Spread, Sum
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, algorithm_of
from megatron.zero_bubble.planning.job.arguments.checks import check
from megatron.zero_bubble.planning.job.arguments.parser import parse
from megatron.zero_bubble.planning.job.model import model_of
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.helpers.training import SMALL, losses, train

FLAGS = "--mock-data --pipeline-model-parallel-size 2 --train-iters 5"


@pytest.mark.parametrize("schedule", ["zb-v", "zb-h1 --zero-bubble-post-validation"])
def test_chosen_iterations_are_recorded(ranks: RankPool, tmp_path: Path, schedule: str) -> None:
    chosen = f"--zero-bubble-trace {tmp_path} --zero-bubble-trace-iterations 2-3,5,9"
    costs = f"--zero-bubble-record-costs {tmp_path}/costs.json"
    train(ranks, 2, f"{FLAGS} --zero-bubble-schedule {schedule} {chosen} {costs}")
    recording = read_trace_file(tmp_path / "trace.json")
    assert list(recording.traces) == [2, 3, 5]
    placement = Placement.vee(2) if schedule == "zb-v" else Placement.linear(2)
    for trace in recording.traces.values():
        assert trace.timeline.schedule.placement == placement
        assert trace.timeline.schedule.num_microbatches == 8
        for row in trace.ranks:
            assert row.sends
            assert row.receives
            assert bool(row.validations) == ("post-validation" in schedule)
    assert recording.memory is not None
    assert min(recording.memory.activation) > 1000
    written, memory = read_costs_file(tmp_path / "costs.json").on(placement)
    assert (written, memory) == (recording.costs, recording.memory)
    file = read_costs_file(tmp_path / "costs.json")
    assert file.layers_per_stage == ((1,) * 4 if schedule == "zb-v" else (2, 2))
    assert file.layer_costs() is not None and not file.halves(Placement.interleaved(2, 3))
    tokens = file.tokens
    assert tokens is not None
    assert tokens.sequence == 32
    assert tokens.least in (1, 2, 4, 8, 16, 32)
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")


def test_all_to_alls_of_experts_are_measured(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As parts of the passes, from which pairs are planned; the recording changes no loss. Memory is as estimated, but
    for what local layers keep besides.
    """
    file = tmp_path / "costs.json"
    experts = (
        "--mock-data --pipeline-model-parallel-size 2 --train-iters 3 --zero-bubble-schedule zb-h1 --num-experts 4 "
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear --bf16"
    )
    results = [
        losses(train(ranks, 4, f"{experts} {more}", tmp_path / name))
        for name, more in (("plain", ""), ("recorded", f"--zero-bubble-record-costs {file}"))
    ]
    assert results[0] == results[1]
    found = read_costs_file(file)
    costs, memory = found.on(Placement.linear(2))
    job = parse([*SMALL.split(), *experts.split()])
    check(job, 4)
    _, estimated = estimate(model_of(job, (2, 2), flash=False), DEVICES["a100"], Placement.linear(2))
    assert memory is not None
    assert estimated.wgrad[0] == pytest.approx(memory.wgrad[0], rel=0.1)
    assert estimated.activation[0] == pytest.approx(memory.activation[0], rel=0.3)
    assert [stage.layers for stage in costs.experts] == [2, 2] and 0 < costs.exposed_share < 1
    for stage in costs.experts:
        assert min(stage[1:]) > 0
    halves, _ = found.on(Placement.vee(2))  # by layers_per_stage
    assert [stage.layers for stage in halves.experts] == [1] * 4
    assert sum(stage.dispatch for stage in halves.experts) == pytest.approx(sum(s.dispatch for s in costs.experts))
    sizes = ["--costs", str(file), "--num-ranks", "2", "--num-microbatches", "4"]
    assert main(["plan", "--schedule", "dualpipe-v", "--pairs", *sizes]) == 0
    assert "all-to-all of experts: " in capsys.readouterr().out


def test_megatrons_own_schedule_is_recorded(ranks: RankPool, tmp_path: Path) -> None:
    """Passes of Megatron's schedule are recorded; its messages and memory are not."""
    train(ranks, 2, f"{FLAGS} --zero-bubble-trace {tmp_path}")
    recording = read_trace_file(tmp_path / "trace.json")
    assert list(recording.traces) == [1, 2, 3, 4, 5]
    assert recording.memory is None
    schedule = recording.traces[5].timeline.schedule
    assert schedule.name == "stock 1f1b"
    assert not recording.traces[5].ranks[0].sends


def test_no_files_without_a_recorded_iteration(ranks: RankPool, tmp_path: Path) -> None:
    train(ranks, 2, f"{FLAGS} --zero-bubble-trace {tmp_path}/x --zero-bubble-trace-iterations 5 --exit-interval 2")
    assert not list((tmp_path / "x").iterdir())


@pytest.mark.parametrize(("schedule", "algorithm"), some([("zb-h1", 2), ("zb-v", 1)], ("zb-h1", 2)))
def test_divided_vocabulary_is_measured(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str, algorithm: Algorithm
) -> None:
    """The trace has the flow and the collectives, and the planner takes the costs."""
    file = str(tmp_path / "costs.json")
    lines = train(
        ranks,
        2,
        f"{FLAGS} --zero-bubble-schedule {schedule} --zero-bubble-vocabulary-parallel {algorithm} --vocab-size 2000 "
        f"--tokenizer-type NullTokenizer --zero-bubble-trace {tmp_path} --zero-bubble-record-costs {file} "
        "--zero-bubble-log-bubble",
        tmp_path / "metrics.jsonl",
    )
    bubbles = [line for line in lines if line["kind"] == "bubble"]
    # A rank that the others never make wait has no bubble in the plan.
    assert bubbles and all(0 < line["measured"] < 1 and -1e-9 < line["planned"] < 1 for line in bubbles)
    recording = read_trace_file(tmp_path / "trace.json")
    placement = Placement.vee(2) if schedule == "zb-v" else Placement.linear(2)
    for trace in recording.traces.values():
        assert algorithm_of(trace.timeline.schedule) == algorithm
        assert trace.timeline.schedule.placement == placement
        started = Counter(type(span.op) for row in trace.ranks for span in row.lanes)
        assert started[Spread] and started[Sum]
        ends = {span.pass_: span.end_ms for row in trace.ranks for span in row.spans}
        for row in trace.ranks:
            for lane in row.lanes:
                assert isinstance(lane.op, Collective)
                if isinstance(lane.op, Spread) and not lane.op.is_root:  # issued before there is a value to receive
                    assert lane.end_ms >= ends[lane.op.value.producer] - row.clock_error_ms - 0.001
    read = read_costs_file(file)
    costs, memory = read.on(placement)
    assert (costs, memory) == (recording.costs, recording.memory)
    assert costs.vocabulary is not None and memory is not None
    assert min(*costs.vocabulary.output_ms, *costs.vocabulary.output_wgrad_ms, *costs.vocabulary.embedding_ms) > 0
    assert min(memory.logits) > 2 * 32 * 1000 * 4, "S keeps a softmax in float32"
    assert read.tokens is not None and read.tokens.least is None, "slices are not supported"
    sizes = ["--num-ranks", "2", "--num-microbatches", "8", "--memory-limit", "3p"]
    assert main(["plan", "--schedule", schedule, *sizes, "--costs", file, "--vocabulary", "auto"]) == 0
    assert main(["trace", str(tmp_path / "trace.json")]) == 0
    out = capsys.readouterr().out
    assert f"{schedule} (vocabulary " in out and "along the critical chain" in out

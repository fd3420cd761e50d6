"""Tests of ``--zero-bubble-trace`` in our training loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.formats.costs import read_costs_file
from megatron.zero_bubble.formats.trace import read_trace_file
from tests.helpers.ranks import RankPool
from tests.helpers.training import train

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
    tokens = read_costs_file(tmp_path / "costs.json").tokens
    assert tokens is not None
    assert tokens.sequence == 32
    assert tokens.least in (1, 2, 4, 8, 16, 32)
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")


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
    train(ranks, 2, f"{FLAGS} --zero-bubble-trace {tmp_path}/x --zero-bubble-trace-iterations 9")
    assert not list((tmp_path / "x").iterdir())

"""Tests of memory curves: steps at the right times, and the same peaks as the simulation."""

from __future__ import annotations

import pytest
from hypothesis import given

from megatron.zero_bubble import PassCosts, PassMemory, Schedule, build, simulate
from megatron.zero_bubble.analysis.memory import memory_curve, most_kept
from tests.helpers.strategies import schedules


def test_forwards_count_from_their_start_and_other_passes_from_their_end() -> None:
    schedule = build("zb-h1", num_ranks=1, num_microbatches=1)
    timeline = simulate(schedule, PassCosts.uniform(schedule.placement, 3, 4, 5))
    assert memory_curve(timeline, PassMemory.uniform(schedule.placement, 8, 2)) == (((0, 8), (7, 2), (12, 0)),)


@given(schedules())
def test_peaks_equal_the_simulations(schedule: Schedule) -> None:
    memory = PassMemory.uniform(schedule.placement, 4, 1)
    timeline = simulate(schedule, PassCosts.uniform(schedule.placement, 10, 10, 10), memory)
    curves = memory_curve(timeline, memory)
    assert [max(step.amount for step in curve) / 4 for curve in curves] == pytest.approx(timeline.peak_activation)
    assert most_kept(timeline, memory) == pytest.approx([max(step.amount for step in curve) for curve in curves])
    assert all(curve[-1].amount == pytest.approx(0) for curve in curves)

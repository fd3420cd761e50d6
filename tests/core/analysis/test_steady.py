"""Tests of the steady state: periods of known schedules, and none where nothing repeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble import PassCosts, Placement, Timeline, build, simulate
from megatron.zero_bubble.core.analysis.steady import Period, find_period
from tests.helpers.gpipe import gpipe


def simulated(name: str, num_ranks: int, num_microbatches: int) -> Timeline:
    schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return simulate(schedule, PassCosts.uniform(schedule.placement, 18.5, 18.1, 9.3, 0.6))


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v"])
def test_dense_schedules_repeat_after_the_work_of_a_microbatch(name: str) -> None:
    found = find_period(simulated(name, 8, 64))
    assert found is not None
    assert found.num_microbatches == 1
    assert found.length_ms == pytest.approx(18.5 + 18.1 + 9.3)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b"])
def test_schedules_in_groups_repeat_after_a_group(name: str) -> None:
    """Transfers delay each group of p microbatches; within a group, an interleaved rank repeats passes of one stage."""
    found = find_period(simulated(name, 16, 64))
    assert found is not None
    assert found.num_microbatches == 16


def test_every_pass_of_a_period_returns_later() -> None:
    timeline = simulated("v-min", 16, 64)
    found = find_period(timeline)
    assert found is not None
    begin, length, count = found
    starts = {span.pass_: span.start_ms for row in timeline.spans for span in row}
    window = [p for p, start in starts.items() if begin <= start < begin + length - 1e-6]
    assert len(window) == 16 * 2 * 3 * count
    assert [starts[p._replace(microbatch=p.microbatch + count)] for p in window] == pytest.approx(
        [starts[p] + length for p in window]
    )


def test_one_rank_out_of_step_has_no_period() -> None:
    timeline = simulated("zb-h1", 4, 16)
    assert isinstance(find_period(timeline), Period)
    spans = [
        span._replace(start_ms=span.start_ms + 0.01 * span.pass_.microbatch**2, end_ms=span.end_ms + 10.0)
        for span in timeline.spans[2]
    ]
    assert find_period(replace(timeline, spans=(*timeline.spans[:2], tuple(spans), timeline.spans[3]))) is None


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_few_microbatches_have_no_period(num_microbatches: int) -> None:
    assert find_period(simulated("zb-h1", 4, num_microbatches)) is None


def test_repeated_forwards_of_the_warm_up_are_no_period() -> None:
    schedule = gpipe(Placement.linear(4), 32)
    assert find_period(simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0))) is None

"""Tests of the bubble meter on real ranks, with a clock that replays a plan."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.core.analysis.bubble import Bubble
from megatron.zero_bubble.core.analysis.timeline import Span, Timeline
from megatron.zero_bubble.core.costs.lengths import LengthCost, Load
from megatron.zero_bubble.core.ir import Compute
from megatron.zero_bubble.engine.measure.bubble_meter import BubbleMeter
from megatron.zero_bubble.engine.platforms.cpu import CpuPlatform
from megatron.zero_bubble.engine.runtime.observer import IterationStart, observed
from tests.helpers.ranks import RankPool

COSTS = (5.0, 9.0, 3.0, 1.0)


class Clock(CpuPlatform):
    """A clock whose time is set by the test."""

    now_ms = 0.0

    def mark(self) -> float:
        return self.now_ms / 1e3


def timeline_of(name: str, num_microbatches: int) -> Timeline:
    schedule = build(name, num_ranks=3, num_microbatches=num_microbatches)
    return simulate(schedule, PassCosts.uniform(schedule.placement, *COSTS))


def play(meter: BubbleMeter, clock: Clock, spans: list[Span]) -> None:
    for work, start, end in spans:
        clock.now_ms = start
        meter.begin(Compute(work))
        clock.now_ms = end
        meter.end(Compute(work))


def measured(
    rank: int, timelines: list[Timeline], again_ms: float, varies: bool = False
) -> tuple[Bubble | None, Bubble | None]:
    """Replay one iteration per timeline; return two consecutive readings.

    With ``again_ms``, the first pass also runs ``again_ms`` earlier and is then discarded.
    """
    assert dist.group.WORLD is not None
    clock = Clock()
    meter = BubbleMeter(clock)
    clock_error_ms = 1000.0 * rank  # must not matter
    for timeline in timelines:
        spans = [Span(work, start + clock_error_ms, end + clock_error_ms) for work, start, end in timeline.spans[rank]]
        first = spans[0]
        start = IterationStart(dist.group.WORLD, timeline.schedule.num_microbatches, varies=varies)
        with observed(meter, start):
            if again_ms:
                play(meter, clock, [Span(first.pass_, first.start_ms - again_ms, first.end_ms - again_ms)])
                meter.restarted()
            play(meter, clock, spans)
    return meter.read(dist.group.WORLD), meter.read(dist.group.WORLD)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "1f1b"])
def test_bubble_of_a_replayed_plan_equals_the_plans(ranks: RankPool, name: str) -> None:
    timeline = timeline_of(name, 6)
    instant = simulate(timeline.schedule, PassCosts.uniform(timeline.schedule.placement, *COSTS[:3]))
    for bubble, nothing_new in ranks.run(3, measured, [timeline] * 4, 0.0):
        assert bubble is not None and bubble.num_iterations == 4
        assert bubble.measured == pytest.approx(timeline.bubble_rate("span"))
        assert bubble.planned == pytest.approx(instant.bubble_rate("span"))
        assert nothing_new is None


def test_planned_bubble_is_of_the_last_iteration(ranks: RankPool) -> None:
    """Schedule and number of microbatches can change between iterations."""
    short, long = timeline_of("zb-h1", 4), timeline_of("1f1b", 9)
    bubble, _ = ranks.run(3, measured, [short, long], 0.0)[0]
    assert bubble is not None
    span_ms, work_ms = short.span_ms + long.span_ms, short.work_ms + long.work_ms
    assert bubble.measured == pytest.approx((span_ms - work_ms) / span_ms)
    assert [len(row) for row in long.schedule.order] == [18] * 3
    fused = PassCosts.uniform(long.schedule.placement, *COSTS[:3])
    assert bubble.planned == pytest.approx(simulate(long.schedule, fused).bubble_rate("span"), abs=0.05)


def test_planned_bubble_of_different_lengths_is_that_of_their_passes(ranks: RankPool) -> None:
    """With mean times, it would be that of equal lengths."""
    loads = [tuple(Load.of([tokens]) for tokens in of) for of in ((1, 9, 2, 8, 1, 9), (12, 1, 1, 1, 1, 12))]
    timelines = []
    for own in loads:
        schedule = build("zb-h1", num_ranks=3, num_microbatches=6)
        timelines.append(simulate(schedule, LengthCost(3.0).passes(schedule.placement, own)))
    expected = timelines[-1].bubble_rate("span")
    (own, _), (mean, _) = (ranks.run(3, measured, timelines, 0.0, differ)[0] for differ in (True, False))
    assert own is not None and own.planned == pytest.approx(expected)
    assert mean is not None and mean.planned < 0.7 * expected


def measured_one_by_one(rank: int, timelines: list[Timeline]) -> list[Bubble | None]:
    """Replay the timelines with a reading after each iteration."""
    assert dist.group.WORLD is not None
    clock = Clock()
    meter, bubbles = BubbleMeter(clock), []
    for timeline in timelines:
        with observed(meter, IterationStart(dist.group.WORLD, timeline.schedule.num_microbatches)):
            play(meter, clock, list(timeline.spans[rank]))
        bubbles.append(meter.read(dist.group.WORLD))
    return bubbles


def test_reading_excludes_earlier_iterations(ranks: RankPool) -> None:
    """Pass times are excluded as well: the second iteration's forwards take ten times as long."""
    schedule = build("zb-h1", num_ranks=3, num_microbatches=4)
    costs = [PassCosts.uniform(schedule.placement, forward_ms, 9.0, 3.0) for forward_ms in (5.0, 50.0)]
    timelines = [simulate(schedule, figures) for figures in costs]
    for bubbles in ranks.run(3, measured_one_by_one, timelines):
        for bubble, timeline in zip(bubbles, timelines, strict=True):
            assert bubble is not None and bubble.num_iterations == 1
            assert bubble.measured == pytest.approx(timeline.bubble_rate("span"))
            assert bubble.planned == pytest.approx(timeline.bubble_rate("span"))


def test_discarded_passes_count_as_bubble(ranks: RankPool) -> None:
    timeline = timeline_of("zb-h1", 6)
    bubble, _ = ranks.run(3, measured, [timeline], 100.0)[0]
    assert bubble is not None
    assert bubble.measured == pytest.approx(1 - timeline.work_ms / (timeline.span_ms + 100.0))

"""Tests of idle time by cause: with the mean work, the causes add up to the makespan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, Schedule, build, simulate
from megatron.zero_bubble.core.costs.experts import NO_EXPERTS
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.core.search.vocabulary import with_vocabulary
from megatron.zero_bubble.planning.idle import Idle, exposed_ms, idle_of
from tests.helpers.strategies import costs_for, schedules


@given(st.data())
def test_idle_and_mean_work_add_up_to_the_makespan(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    costs = replace(data.draw(costs_for(schedule)), message_ms=data.draw(st.floats(0.0, 2.0)))
    timeline = simulate(schedule, costs)
    idle = idle_of(timeline, costs)
    assert min(idle) >= 0.0
    assert idle.total + timeline.mean_work_ms == pytest.approx(timeline.makespan_ms)
    # The mean over ranks of what each one idles, by their spans.
    handled = [sum(map(sum, map(timeline.message_ends, (span.pass_ for span in row)))) for row in timeline.spans]
    busy = [sum(end - start for _, start, end in row) for row in timeline.spans]
    idle_ms = [timeline.makespan_ms - a + b for a, b in zip(busy, handled, strict=True)]
    assert idle.total == pytest.approx(sum(idle_ms) / len(idle_ms))
    assert idle.total / timeline.makespan_ms == pytest.approx(timeline.idle_rate("makespan"))


@given(schedules(), st.floats(0.0, 5.0))
def test_equal_ranks_have_no_imbalance(schedule: Schedule, comm_ms: float) -> None:
    costs = PassCosts.uniform(schedule.placement, 4.0, 5.0, 3.0, comm_ms)
    timeline = simulate(schedule, costs)
    idle = idle_of(timeline, costs)
    assert idle.imbalance == pytest.approx(0.0, abs=1e-9)
    assert timeline.idle_rate("makespan") == pytest.approx(timeline.bubble_rate("makespan"))


def test_each_cause_is_the_one_that_it_is_named_after() -> None:
    schedule = build("1f1b", num_ranks=4, num_microbatches=8)
    uniform = PassCosts.uniform(schedule.placement, 4.0, 5.0, 3.0)
    # 1F1B: p - 1 microbatches of F, B and W fill and drain the pipeline (arXiv 2401.10241, table 1).
    assert idle_of(simulate(schedule, uniform), uniform) == pytest.approx(Idle(0.0, 3 * 12.0, 0.0))
    slow = replace(uniform, comm_ms=2.0)
    timeline = simulate(schedule, slow)
    assert idle_of(timeline, slow) == pytest.approx(Idle(timeline.makespan_ms - 11 * 12.0, 36.0, 0.0))
    uneven = replace(uniform, forward_ms=(4.0, 4.0, 4.0, 16.0))
    assert idle_of(simulate(schedule, uneven), uneven).imbalance == pytest.approx(8 * 12.0 * 3 / 4)


@pytest.mark.parametrize("algorithm", [1, 2])
def test_collectives_are_transfers(algorithm: int) -> None:
    schedule = build("zb-h1", num_ranks=3, num_microbatches=5)
    costs = PassCosts.uniform(schedule.placement, 5, 6, 4)
    costs = replace(costs, vocabulary=VocabularyCosts.uniform(3, 2.0, 1.0, collective_ms=0.5))
    timeline = timeline_of(with_vocabulary(schedule, costs, algorithm, delay=True), costs)  # type: ignore[arg-type]
    idle = idle_of(timeline, costs)
    assert idle.transfers > 0.5
    assert idle.total + timeline.mean_work_ms == pytest.approx(timeline.makespan_ms)


def test_all_to_alls_are_exposed_unless_they_are_hidden() -> None:
    """F, B and W of two layers take 10 ms each, and every all-to-all 1 ms, on both stages."""
    sent = NO_EXPERTS._replace(layers=2.0, dispatch=1.0, combine=1.0, combine_grad=1.0, dispatch_grad=1.0, experts=4.0)
    alone = build("interleaved-1f1b", num_ranks=1, num_microbatches=4, num_chunks=2)
    costs = PassCosts.uniform(alone.placement, 20.0, 20.0, 20.0).with_experts((sent, sent))
    assert exposed_ms(simulate(alone, costs), costs) == pytest.approx(4 * 2 * 4.0)
    pairs = build("interleaved-1f1b", num_ranks=1, num_microbatches=4, num_chunks=2, pairs=True)
    hidden = simulate(pairs, costs)
    assert 0 < exposed_ms(hidden, costs) < 20.0  # of the passes that run alone
    assert hidden.mean_work_ms == pytest.approx(4 * 2 * (30.0 - 4.0) + exposed_ms(hidden, costs))
    slower = costs.with_experts((sent, sent), contention=1.5)
    assert exposed_ms(simulate(pairs, slower), slower) > 20.0


def test_without_work_nothing_is_idle() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=1)
    costs = PassCosts.uniform(schedule.placement, 0.0, 0.0, 0.0)
    assert idle_of(simulate(schedule, costs), costs) == Idle(0.0, 0.0, 0.0)
    assert simulate(schedule, costs).idle_rate("span") == 0.0

"""Tests of the comparison of orders: equal to their timelines, at a fraction of the work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, PassMemory, Schedule, ScheduleError, build, simulate
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.orders import outcomes
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.search.vocabulary import with_vocabulary
from tests.helpers.strategies import costs_for, schedules
from tests.helpers.work import lines_run


def check(orders: list[Schedule], costs: PassCosts, memory: PassMemory) -> None:
    for order, found in zip(orders, outcomes(orders, costs, memory), strict=True):
        timeline = simulate(order, costs, memory)
        lengths = timeline.makespan_ms, timeline.span_ms
        assert found == (order, *lengths, max(most_kept(timeline, memory)))


@given(st.data())
def test_outcomes_are_those_of_timelines_to_the_last_bit(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    check([schedule], data.draw(costs_for(schedule)), PassMemory.uniform(schedule.placement, 1.0, 0.3))


def test_what_graphs_keep_counts() -> None:
    orders, costs, memory = with_lags("zb-v", 4, 8)
    check(orders, costs, replace(memory, wgrad=memory.activation, captured=memory.activation))


def with_lags(name: str, num_ranks: int, num_microbatches: int) -> tuple[list[Schedule], PassCosts, PassMemory]:
    schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    on, shards = schedule.placement, VocabularyCosts.uniform(num_ranks, 0.3, 0.2, collective_ms=0.7)
    costs = replace(PassCosts.uniform(on, 1.1, 1.3, 0.9, 0.1), message_ms=0.05, vocabulary=shards)
    memory = replace(PassMemory.uniform(on, 1.0, 0.3), logits=(0.5,) * num_ranks)
    return [with_vocabulary(schedule, costs, 2, lag, True) for lag in (0.0, 0.5, 1.0)], costs, memory


@pytest.mark.parametrize("name", ["zb-h1", "1f1b", "zb-v"])
def test_collectives_messages_and_logits_count(name: str) -> None:
    check(*with_lags(name, 3, 5))


def test_pairs_are_simulated_one_by_one() -> None:
    paired = build("dualpipe-v", num_ranks=2, num_microbatches=4, pairs=True)
    check([paired], PassCosts.uniform(paired.placement, 1.0, 1.0, 1.0), PassMemory.uniform(paired.placement))


def test_an_order_that_deadlocks_is_described() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    late = replace(schedule, order=(tuple(reversed(schedule.order[0])), schedule.order[1]))
    costs, memory = PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0), PassMemory.uniform(schedule.placement)
    with pytest.raises(ScheduleError, match="wait"):
        list(outcomes([schedule, late], costs, memory))


def test_a_further_order_takes_a_fraction_of_a_simulation() -> None:
    """What passes take and wait for is found once."""
    orders, costs, memory = with_lags("zb-v", 4, 8)

    def work(count: int) -> int:
        return lines_run(lambda: list(outcomes(orders[:count], costs, memory)))

    assert (work(3) - work(1)) / 2 < 0.4 * lines_run(lambda: simulate(orders[0], costs, memory))

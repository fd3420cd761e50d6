"""Tests of memory curves: steps at the right times, and the same peaks as the simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, PassMemory, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.memory import memory_curve, message_peaks, most_kept, peaks_in_order
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Compute, Plan, Recv, Send, Settle, Value
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.plan.offload import select_longest
from megatron.zero_bubble.core.plan.slots import num_slots, slots
from megatron.zero_bubble.core.search.timed import timed
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


def most_messages(plan: Plan, rank: int) -> float:
    """The most that a rank has sent and not settled, or has room for and not used, added up op by op; the message of a
    slice is its share of one.
    """
    shares = plan.schedule.slices.shares
    sent, awaited, most = 0.0, set[Value](), 0.0
    for op in plan.ops[rank]:
        if isinstance(op, Send | Settle):
            sent += shares[op.message.producer.slice] * (1 if isinstance(op, Send) else -1)
        if isinstance(op, Recv):
            awaited.add(op.message.value)
        most = max(most, sent + sum(shares[value.producer.slice] for value in awaited))
        if isinstance(op, Compute):
            awaited.difference_update(plan.schedule.flow.inputs(op.work))
    return most


@given(schedules(), st.data())
def test_messages_are_counted_and_offloading_adds_none(schedule: Schedule, data: st.DataObject) -> None:
    share = data.draw(st.floats(0, 1))
    plan = plan_of(schedule)
    counted = message_peaks(plan)
    assert counted == pytest.approx([most_messages(plan, rank) for rank in range(len(plan.ops))])
    moved = message_peaks(plan_of(schedule, Additions(moves=tuple(select_longest(schedule, share)))))
    assert all(mine <= without + 1e-9 for mine, without in zip(moved, counted, strict=True))


def test_the_message_of_a_slice_takes_its_share() -> None:
    (whole, _), (sliced, _) = (
        message_peaks(plan_of(build("seq-1f1b", num_ranks=2, num_microbatches=2, num_slices=slices)))
        for slices in (1, 4)
    )
    assert 0 < sliced <= whole / 2


def test_steady_states_of_any_length_have_the_same_messages() -> None:
    few, many = (plan_of(build("zb-h2", num_ranks=4, num_microbatches=m)) for m in (40, 400))
    assert many.stem is not many, "the analysis must work on plans that are stored once per window"
    assert message_peaks(few) == message_peaks(many)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "v-half"])
def test_graphs_keep_the_memory_of_as_many_microbatches_as_a_stage_has_at_once(name: str) -> None:
    """Two stages of a rank that have their most microbatches at different times need both amounts with graphs."""
    schedule = build(name, num_ranks=4, num_microbatches=12)
    on, ones = schedule.placement, (1.0,) * schedule.num_stages
    costs = PassCosts.uniform(on, 1.0, 1.0, 1.0)
    outside, graphed = PassMemory(ones, ones), PassMemory(ones, ones, captured=ones)
    plan = Plan.bare(schedule)
    counted = tuple(float(num_slots(slots(plan, rank))) for rank in range(4))
    timeline = simulate(schedule, costs, graphed)
    assert most_kept(timed(schedule, costs, graphed), graphed) == most_kept(timeline, graphed)
    assert most_kept(timeline, graphed) == peaks_in_order(schedule, graphed) == counted
    live = peaks_in_order(schedule, outside)
    assert all(a >= b for a, b in zip(counted, live, strict=True))
    assert (counted == live) == (on.num_stages == 4)
    assert [curve[0].amount for curve in memory_curve(timeline, graphed)] == list(counted)
    half = replace(graphed, captured=(0.5,) * on.num_stages)
    assert peaks_in_order(schedule, half) == tuple((a + b) / 2 for a, b in zip(counted, live, strict=True))


def test_graphs_keep_no_more_than_a_microbatch_takes() -> None:
    with pytest.raises(UserError, match="captured must be a part of activation and of wgrad; got 2 of 3 and 1 on st"):
        PassMemory((3.0,), (1.0,), captured=(2.0,))


def test_messages_are_as_wide_as_the_stage_that_hands_them_on() -> None:
    plan = plan_of(build("1f1b", num_ranks=3, num_microbatches=4))
    plain = message_peaks(plan)
    assert message_peaks(plan, (2.0, 2.0, 1.0)) == tuple(2 * peak for peak in plain)
    first, middle, last = message_peaks(plan, (1.0, 3.0, 1.0))
    assert first == plain[0], "activations to the second rank, and their gradients"
    assert last == 3 * plain[2]
    assert plain[1] < middle < 3 * plain[1]

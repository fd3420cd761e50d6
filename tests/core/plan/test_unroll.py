"""Plans that store the repeated part of a schedule once are equal to plans that are lowered pass by pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.core.analysis.steps import steps
from megatron.zero_bubble.core.analysis.validate import ScheduleError, validate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Chain, Compute, Kind, Op, Pass, Placement, Plan, Schedule, Value
from megatron.zero_bubble.core.ir.collectives import Spread, collectives_of
from megatron.zero_bubble.core.ir.ops import OPS
from megatron.zero_bubble.core.ir.plan import Unrolled
from megatron.zero_bubble.core.ir.repeats import find_repeats
from megatron.zero_bubble.core.plan import communicate, lower, prove, prove_for_queues, with_validation
from megatron.zero_bubble.core.plan.lower import LoweringPass
from megatron.zero_bubble.core.plan.unroll import can_repeat
from megatron.zero_bubble.core.schedules import SCHEDULES, build
from megatron.zero_bubble.core.search.auto import zb_auto
from tests.helpers.plans import plan_from_text
from tests.helpers.rows import some

REPEATING = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min")
PASSES: dict[str, tuple[LoweringPass, ...]] = {
    "communicate": (communicate,),
    "with validation": (communicate, with_validation),
    "two in flight": (partial(communicate, max_in_flight=2),),
}


def pass_by_pass(schedule: Schedule, passes: tuple[LoweringPass, ...]) -> Plan:
    plan = Plan.bare(schedule)
    for lowering_pass in passes:
        plan = lowering_pass(plan)
    return plan


def stored(plan: Plan) -> int:
    """The number of microbatches whose ops a plan stores."""
    return plan.stem.schedule.num_microbatches


@pytest.mark.parametrize("num_ranks", some([2, 3, 4], 3))
@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_ops_are_those_of_lowering_pass_by_pass(name: str, passes: tuple[LoweringPass, ...], num_ranks: int) -> None:
    schedule = build(name, num_ranks=num_ranks, num_microbatches=48)
    if passes is PASSES["two in flight"]:
        schedule = schedule.forward_only()
    try:
        plan = lower(schedule, passes)
    except PlanError:
        with pytest.raises(PlanError):
            prove(pass_by_pass(schedule, passes))
        return
    expected = pass_by_pass(schedule, passes)
    assert (plan.schedule, tuple(plan.ops), plan.drain) == (schedule, expected.ops, expected.drain)
    assert [plan.executable(rank).registers for rank in range(num_ranks)] == [
        expected.executable(rank).registers for rank in range(num_ranks)
    ]
    assert plan.channels == expected.channels


@pytest.mark.parametrize("name", REPEATING)
def test_what_is_stored_does_not_grow_with_the_microbatches(name: str) -> None:
    few, many = (lower(build(name, num_ranks=4, num_microbatches=count)) for count in (120, 240))
    assert stored(few) == stored(many) < 40
    assert few.digest != many.digest
    validate(many.schedule)
    prove(many)
    prove_for_queues(many)


@settings(deadline=None, max_examples=25)
@given(
    num_ranks=st.integers(2, 5),
    num_microbatches=st.integers(24, 60),
    times=st.tuples(*[st.floats(1, 3)] * 3, st.floats(0, 1)),
    limit=st.floats(0.4, 2),
)
def test_ops_of_searched_schedules(
    num_ranks: int, num_microbatches: int, times: tuple[float, float, float, float], limit: float
) -> None:
    *passes, hop = times
    f, b, w = ((ms,) * num_ranks for ms in passes)
    costs = PassCosts(f, b, w, hop)
    memory = PassMemory((1.0,) * num_ranks, (0.5,) * num_ranks)
    schedule = zb_auto(costs, memory, num_ranks, num_microbatches, max(limit * num_ranks, 1), effort=0.05)
    assert lower(schedule).ops == pass_by_pass(schedule, (communicate,)).ops


def unrolled() -> tuple[Plan, Unrolled]:
    plan = lower(build("zb-h1", num_ranks=4, num_microbatches=60))
    assert isinstance(plan.ops, Unrolled)
    return plan, plan.ops


def test_a_plan_is_refused_if_its_windows_cannot_follow_each_other() -> None:
    plan, ops = unrolled()
    with pytest.raises(PlanError, match="refused"):  # every second microbatch would be missing
        prove(replace(plan, ops=replace(ops, num_microbatches=2)))
    begin, end, next_end = ops.cuts
    uneven = (begin, (*end[:-1], end[-1] - 1), next_end)  # the last rank would leave out an op in each window
    with pytest.raises(PlanError, match="refused"):
        prove(replace(plan, ops=replace(ops, cuts=uneven)))


def test_cuts_must_be_consistent() -> None:
    """The last rank would repeat a later window than the others, and would need what they have not sent by then."""
    schedule = build("zb-h1", num_ranks=2, num_microbatches=60).forward_only()
    ops = lower(schedule, PASSES["two in flight"]).ops
    assert isinstance(ops, Unrolled)
    rows, (begin, end, next_end) = steps(ops.stem), ops.cuts

    def moved(cut: tuple[int, ...]) -> tuple[int, ...]:
        return (*cut[:-1], cut[-1] + end[-1] - begin[-1])

    ahead = replace(ops, cuts=(moved(begin), moved(end), moved(next_end)))
    assert can_repeat(ops, rows)
    assert not can_repeat(ahead, rows)


def test_messages_in_transit_must_have_the_same_order() -> None:
    """The windows are equal, and so are the sets of messages in transit, but a third would receive ``:b`` too early."""
    rows = (
        "0F0:b>1 0F0>1 0F1:b>1 0F1>1 | 0F2>1 0F2:b>1 | 0F3>1 0F3:b>1 |",
        "| 0F0:b<0 0F0<0 | 0F1:b<0 0F1<0 | 0F2<0 0F2:b<0 0F3<0 0F3:b<0",
    )
    schedule = build("zb-h1", num_ranks=2, num_microbatches=4)
    stem = plan_from_text(schedule, (row.replace("|", "").split() for row in rows))
    marks = [[place for place, word in enumerate(row.split()) if word == "|"] for row in rows]
    begin, end, next_end = (tuple(mark[number] - number for mark in marks) for number in range(3))
    assert not can_repeat(Unrolled(stem, (begin, end, next_end), 1, 1), steps(stem))


def test_collectives_must_have_the_same_order() -> None:
    """The stem has the same order on both ranks, but in a third window rank 1 would run 0F4 before 0F5."""
    rows = (
        "0F0:b>* 0F1:b>* 0F2:b>* 0F3:b>* | 0F5:b>* 0F4:b>* | 0F7:b>* 0F6:b>* |",
        "| 0F0:b<*0 0F1:b<*0 | 0F2:b<*0 0F3:b<*0 | 0F5:b<*0 0F4:b<*0 0F7:b<*0 0F6:b<*0",
    )
    schedule = build("zb-h1", num_ranks=2, num_microbatches=8)
    words = (row.replace("|", "").split() for row in rows)
    stem = plan_from_text(schedule, words, (*collectives_of(2), *OPS))
    assert not list(Spread.faults(schedule, stem.ops, False))
    marks = [[place for place, word in enumerate(row.split()) if word == "|"] for row in rows]
    begin, end, next_end = (tuple(mark[number] - number for mark in marks) for number in range(3))
    assert not can_repeat(Unrolled(stem, (begin, end, next_end), 2, 1), steps(stem))


class Mark(Op):
    """An op that does nothing and does not say what it is for later microbatches."""


def test_a_plan_with_an_op_that_has_no_later_is_stored_pass_by_pass() -> None:
    def marked(plan: Plan) -> Plan:
        return replace(plan, ops=tuple((*row, Mark()) for row in plan.ops))

    plan = lower(build("zb-h1", num_ranks=2, num_microbatches=40), (communicate, marked))
    assert stored(plan) == 40


def test_microbatches_out_of_order_are_lowered_pass_by_pass() -> None:
    schedule = build("zb-h1", num_ranks=2, num_microbatches=40)
    other = {20: 21, 21: 20}
    order = tuple(
        tuple(p._replace(microbatch=other.get(p.microbatch, p.microbatch)) for p in row) for row in schedule.order
    )
    plan = lower(replace(schedule, order=order))
    assert [str(op) for op in plan.ops[1] if isinstance(op, Compute)] == list(map(str, order[1]))


def test_an_op_of_a_rank_is_made_for_that_rank_only() -> None:
    plan, ops = unrolled()
    assert len(ops) == 4
    assert ops[1:3] == tuple(ops)[1:3]
    assert ops == tuple(plan.ops) != ops.stem.ops
    assert hash(ops) == hash(tuple(ops))


def changed(schedule: Schedule, rank: int, row: tuple[Pass, ...]) -> Schedule:
    return replace(schedule, order=(*schedule.order[:rank], row, *schedule.order[rank + 1 :]))


def test_a_fault_in_the_repeated_part_is_found() -> None:
    schedule = build("zb-h1", num_ranks=4, num_microbatches=60)
    assert find_repeats(schedule) is not None
    row, late = schedule.order[2], Pass(2, Kind.W, 30)
    with pytest.raises(ScheduleError, match="rank 2 must run 2W30; it is missing"):
        validate(changed(schedule, 2, tuple(p for p in row if p != late)))
    first = (late, *(p for p in row if p != late))
    with pytest.raises(ScheduleError, match="2W30 must come after 2B30 on rank 2"):
        validate(changed(schedule, 2, first))
    last = Pass(2, Kind.B, 59)
    with pytest.raises(ScheduleError, match="2W59 must come after 2B59 on rank 2"):
        validate(changed(schedule, 2, (*(p for p in row if p != last), last)))


def lagging(num_microbatches: int, ahead: int = 12, more: int = 6, until: int = 8) -> Schedule:
    """Rank 0 runs ``ahead`` forwards first; rank 1 runs ``more`` before each of its first backwards, later none, so
    that many windows of rank 0 are acknowledged by the warm-up of rank 1.
    """
    rows: list[list[str]] = [[f"0F{i}" for i in range(ahead)], []]
    forwards = 0
    for i in range(num_microbatches):
        rows[0] += [*([f"0F{ahead}"] if ahead < num_microbatches else []), f"0BW{i}"]
        ahead += 1
        most = max(forwards, min(num_microbatches, i + 1 + (more if i < until else 0)))
        rows[1] += [*(f"1F{number}" for number in range(forwards, most)), f"1BW{i}"]
        forwards = most
    return Schedule.from_text("lagging", Placement.linear(2), num_microbatches, rows)


def test_windows_that_are_acknowledged_by_a_warm_up_are_not_repeated() -> None:
    schedule = lagging(200)
    plan = lower(schedule)
    assert stored(plan) < 100
    assert plan.ops == pass_by_pass(schedule, (communicate,)).ops


@settings(deadline=None, max_examples=40)
@given(st.integers(40, 80), st.integers(0, 16), st.integers(0, 8), st.integers(0, 12))
def test_ops_of_ranks_that_begin_to_repeat_at_different_times(
    num_microbatches: int, ahead: int, more: int, until: int
) -> None:
    schedule = lagging(num_microbatches, ahead, min(more, ahead), until)
    assert lower(schedule).ops == pass_by_pass(schedule, (communicate,)).ops


def test_flows_that_treat_microbatches_differently_are_lowered_in_full() -> None:
    def make_flow(schedule: Schedule) -> Chain:
        class Late(Chain):
            def inputs(self, p: Pass) -> tuple[Value, ...]:
                waits = (Value(Pass(1, Kind.F, 30)),) if p == Pass(0, Kind.F, 30) else ()
                return (*waits, *super().inputs(p))

        return Late(schedule.num_stages)

    schedule = replace(build("zb-h1", num_ranks=2, num_microbatches=60), make_flow=make_flow)
    with pytest.raises(ScheduleError, match="the order deadlocks"):
        validate(schedule)
    with pytest.raises(PlanError, match="refused"):
        lower(schedule)


def test_an_unrolled_plan_must_have_the_microbatches_of_its_schedule() -> None:
    plan, ops = unrolled()
    for copies in (0, -1, ops.copies - 1):
        with pytest.raises(PlanError, match="refused"):
            prove(replace(plan, ops=replace(ops, copies=copies)))


def test_errors_show_the_microbatches_of_the_whole_plan() -> None:
    schedule = build("interleaved-1f1b", num_ranks=6, num_microbatches=100)
    messages = []
    for plan in (lower(schedule), replace(lower(schedule), ops=tuple(lower(schedule).ops))):
        with pytest.raises(PlanError, match="hardware queues") as caught:
            prove_for_queues(plan)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_schedules_without_passes_or_passes_to_lower_them() -> None:
    schedule = build("zb-h1", num_ranks=2, num_microbatches=20)
    with pytest.raises(ScheduleError, match="rank 1 must run 1F0; it is missing"):
        validate(replace(schedule, order=(schedule.order[0], ())))
    assert lower(schedule, ()) == Plan.bare(schedule)


def test_a_repeated_deadlock_is_found() -> None:
    """Each rank repeats the same passes, but the order of the second waits for itself in every window."""
    placement = build("zb-h1", num_ranks=2, num_microbatches=1).placement
    rows = ("0F{0} 0B{0} 0W{0}", "1B{0} 1F{0} 1W{0}")
    order = [" ".join(row.format(number) for number in range(40)).split() for row in rows]
    schedule = Schedule.from_text("stuck", placement, 40, order)
    with pytest.raises(ScheduleError, match="the order deadlocks"):
        validate(schedule)
    with pytest.raises(PlanError, match="refused"):
        lower(schedule)

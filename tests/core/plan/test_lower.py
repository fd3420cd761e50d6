"""Tests of lowering: the positions of sends, receives and settles."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.zero_bubble import Kind, Placement, Schedule, build
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Compute, Plan, Recv, Send, Settle
from megatron.zero_bubble.core.ir.ops import messages
from megatron.zero_bubble.core.plan import (
    Additions,
    Queues,
    communicate,
    lower,
    plan_of,
    plan_of_evaluation,
    prove,
)
from megatron.zero_bubble.core.search.placements import name_of
from tests.helpers.gpipe import PLACEMENTS, gpipe
from tests.helpers.strategies import schedules


def ops_of(plan: Plan, rank: int) -> str:
    return " ".join(map(str, plan.ops[rank]))


def test_ops_of_zb_h1_on_two_ranks() -> None:
    """Receives are posted one pass before their use; a buffer settles once its gradient has arrived."""
    plan = lower(build("zb-h1", num_ranks=2, num_microbatches=2))
    assert ops_of(plan, 0) == "0F0 0F0>1 1B0<1 0F1 0F1>1 0B0 0F0=1 1B1<1 0W0 0B1 0F1=1 0W1"
    assert ops_of(plan, 1) == "0F0<0 1F0 0F1<0 1B0 1B0>0 1F1 1B1 1B1>0 1W0 1W1 1B0=0 1B1=0"


def test_late_ops_of_zb_h1_on_two_ranks() -> None:
    plan = plan_of(build("zb-h1", num_ranks=2, num_microbatches=2), Additions("late"))
    assert ops_of(plan, 0) == "0F0 0F0>1 0F1 0F1>1 1B0<1 0B0 0F0=1 0W0 1B1<1 0B1 0F1=1 0W1"


@given(schedules(), st.booleans())
def test_late_receives_directly_precede_the_pass_that_needs_them(schedule: Schedule, evaluates: bool) -> None:
    plan = plan_of_evaluation(schedule, Additions("late")) if evaluates else plan_of(schedule, Additions("late"))
    for rank, row in enumerate(plan.ops):
        for position, op in enumerate(row):
            if isinstance(op, Recv):
                following = next(other for other in row[position:] if not isinstance(other, Recv))
                assert isinstance(following, Compute)
                needed = plan.schedule.flow.inputs(following.work)
                # Receives of a channel keep its order, even if an earlier message is needed later.
                channel = messages(Recv, plan.ops)[op.message.channel]
                assert any(message.value in needed for message in channel), f"{op} is early on rank {rank}"


@given(schedules())
def test_every_pass_and_message_occurs_exactly_once(schedule: Schedule) -> None:
    plan = lower(schedule)
    ops = [op for row in plan.ops for op in row]
    assert [op.work for row in plan.ops for op in row if isinstance(op, Compute)] == list(schedule.passes())
    messages = [
        sorted((str(op.message.producer), op.message.channel) for op in ops if isinstance(op, kind))
        for kind in (Send, Recv, Settle)
    ]
    assert messages[0] == messages[1] == messages[2]
    hops = sum(a != b for a, b in pairwise(schedule.placement.stage_to_rank))
    assert len(messages[0]) == 2 * hops * schedule.num_microbatches * schedule.num_slices


@given(schedules(min_ranks=3))
def test_send_directly_follows_its_pass(schedule: Schedule) -> None:
    for row in lower(schedule).ops:
        for before, op in pairwise(row):
            if isinstance(op, Send):
                assert before == Compute(op.message.producer)


@given(schedules())
def test_handcrafted_plans_are_valid_with_a_single_hardware_queue(schedule: Schedule) -> None:
    """Loops are excluded: their ranks can send more outputs than the receivers have posted receives for."""
    assume(name_of(schedule.placement) != "loop")
    prove(lower(schedule), Queues.DEVICE)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_interleaved_plans_of_whole_groups_are_valid_with_a_single_hardware_queue(num_ranks: int) -> None:
    """Megatron's own condition: the microbatches are a multiple of the ranks."""
    for groups in (1, 2, 3):
        schedule = build("interleaved-1f1b", num_ranks=num_ranks, num_microbatches=groups * num_ranks)
        prove(lower(schedule), Queues.DEVICE)


@given(schedules(linear=True))
def test_late_receives_are_valid_with_a_single_hardware_queue(schedule: Schedule) -> None:
    """One stage per rank is required: with two, a send can block the receive that its receiver waits for."""
    prove(plan_of(schedule, Additions("late")), Queues.DEVICE)


def test_late_receives_of_zb_v_need_several_hardware_queues() -> None:
    plan = plan_of(build("zb-v", num_ranks=4, num_microbatches=8), Additions("late"))
    with pytest.raises(PlanError, match="the ranks wait for each other"):
        prove(plan, Queues.DEVICE)


@given(schedules(min_ranks=2), st.integers(1, 3))
def test_forward_only_plan_limits_messages_in_flight(schedule: Schedule, limit: int) -> None:
    assume(schedule.num_stages == schedule.num_ranks)
    for row in lower(schedule.forward_only(), (partial(communicate, max_in_flight=limit),)).ops:
        in_flight = 0
        for op in row:
            in_flight += isinstance(op, Send) - isinstance(op, Settle)
            assert in_flight <= limit


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: str(p.stage_to_rank))
@pytest.mark.parametrize("num_slices", [1, 3])
def test_any_placement_and_slices_are_lowered(placement: Placement, num_slices: int) -> None:
    plan = lower(gpipe(placement, 4, num_slices))
    prove(plan)
    hops = sum(a != b for a, b in zip(placement.stage_to_rank, placement.stage_to_rank[1:], strict=False))
    assert sum(isinstance(op, Send) for row in plan.ops for op in row) == 2 * hops * 4 * num_slices


@given(schedules(min_ranks=2))
def test_digest_differs_between_plans(schedule: Schedule) -> None:
    more = build(schedule.name, num_ranks=schedule.num_ranks, num_microbatches=schedule.num_microbatches + 1)
    assert lower(schedule).digest == lower(schedule).digest != lower(more).digest


@given(schedules())
def test_forward_only_plan_computes_all_forwards(schedule: Schedule) -> None:
    plan = plan_of_evaluation(schedule)
    computed = [op.work for row in plan.ops for op in row if isinstance(op, Compute)]
    assert computed == [p for p in schedule.passes() if p.kind is Kind.F]

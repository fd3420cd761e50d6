"""Plans whose receives wait for headers: without a known shape, a receive is posted when its message is sent."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from megatron.zero_bubble import SCHEDULES, build
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Flow, Op, Plan, Recv
from megatron.zero_bubble.core.ir.ops import Effects, Token
from megatron.zero_bubble.core.plan import Additions, Queues, plan_of, plan_of_evaluation, prove
from megatron.zero_bubble.core.schedules import sliced

NAMES = [name for name in SCHEDULES if name not in sliced()]


@dataclass(frozen=True, slots=True)
class HeaderedRecv(Recv):
    """A receive before which the host waits for the header of an activation, which comes with its message."""

    def effects(self, flow: Flow) -> Effects:
        effects = Recv.effects(self, flow)
        return effects._replace(waits=(*effects.waits, Token("sent", self.message)))


def with_headers(plan: Plan) -> Plan:
    """The plan as the ranks run it if all microbatches are valid."""
    return replace(plan, ops=tuple(tuple(map(_headered, row)) for row in plan.ops), drain=())


def _headered(op: Op) -> Op:
    return HeaderedRecv(op.message) if isinstance(op, Recv) and op.message.is_activation else op


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_headers_add_no_deadlock_to_late_receives(name: str, num_ranks: int) -> None:
    """What is proved of late receives holds with headers too, with one queue per channel and with one per GPU."""
    proved = 0
    for count in (1, num_ranks, num_ranks + 1, 3 * num_ranks):
        try:
            schedule = build(name, num_ranks=num_ranks, num_microbatches=count)
        except ValueError:
            continue  # some need a multiple of the ranks
        for plan in (plan_of(schedule, Additions("late")), plan_of_evaluation(schedule, Additions("late"))):
            prove(with_headers(plan))
            if _is_proved(plan):
                prove(with_headers(plan), Queues.DEVICE)
                proved += 1
    assert proved


def _is_proved(plan: Plan) -> bool:
    try:
        prove(plan, Queues.DEVICE)
    except PlanError:
        return False
    return True


def test_headers_would_block_early_receives() -> None:
    """So early receives must not be used: a rank would wait for a header before the pass that others wait for."""
    blocked = 0
    for name in NAMES:
        plan = plan_of(build(name, num_ranks=2, num_microbatches=4))
        try:
            prove(with_headers(plan))
        except PlanError:
            blocked += 1
    assert blocked

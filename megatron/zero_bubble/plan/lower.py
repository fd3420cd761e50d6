"""From a schedule to a plan, by a list of passes over plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from megatron.zero_bubble.errors import PlanError
from megatron.zero_bubble.ir import Plan, Schedule
from megatron.zero_bubble.plan.communicate import communicate
from megatron.zero_bubble.plan.prove import prove

LoweringPass = Callable[[Plan], Plan]


def lower(schedule: Schedule, passes: Sequence[LoweringPass] = (communicate,)) -> Plan:
    """Turn a valid schedule into the ops of every rank, and prove after every lowering pass that the plan can run.

    Args:
        schedule: any schedule that ``analysis.validate`` accepts.
        passes: each adds its ops to the plan of the one before.

    Raises:
        PlanError: when an op lacks what it needs, leaves something behind, or the ranks would wait for each other; with
            each rank's position.
    """
    plan = Plan.bare(schedule)
    for lowering_pass in passes:
        plan = lowering_pass(plan)
        prove(plan)
    return plan


def lower_forward_only(schedule: Schedule) -> Plan:
    """The plan of an evaluation, which may send one way only: nothing comes back to tell when a buffer is free, so a
    channel gets as few of them as the proof allows.
    """
    forwards = schedule.forward_only()
    for most in (2, schedule.num_ranks + 1, 2 * schedule.num_ranks + 1):
        try:
            return lower(forwards, (partial(communicate, max_in_flight=most),))
        except PlanError:
            continue
    return lower(forwards)

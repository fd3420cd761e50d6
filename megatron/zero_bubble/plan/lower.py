"""Lower a schedule to a plan by a list of lowering passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from megatron.zero_bubble.errors import PlanError
from megatron.zero_bubble.ir import Plan, Schedule
from megatron.zero_bubble.ir.collection import without_collection
from megatron.zero_bubble.ir.repeats import find_repeats
from megatron.zero_bubble.plan.communicate import communicate
from megatron.zero_bubble.plan.prove import prove
from megatron.zero_bubble.plan.unroll import unroll

LoweringPass = Callable[[Plan], Plan]

_KEPT, _MORE = 6, 2
"""Repeated windows in the stem of a plan, and the factor by which it gets more until its ops repeat as well."""


@without_collection()
def lower(schedule: Schedule, passes: Sequence[LoweringPass] = (communicate,)) -> Plan:
    """Turn a valid schedule into the ops of every rank, and prove after every lowering pass that the plan can run.

    The steady state of a schedule, which repeats the same passes, is lowered and proved only once.

    Args:
        schedule: any schedule that ``analysis.validate`` accepts.
        passes: lowering passes; each adds ops to the plan of the previous one.

    Raises:
        PlanError: when an op lacks an input, a resource is never released, or the ranks would wait for each other; the
            message shows the position of each rank.
    """
    repeats, kept = find_repeats(schedule), _KEPT
    while repeats is not None and 2 * kept <= repeats.copies:
        whole = partial(unroll, schedule=schedule, repeats=repeats, kept=kept)
        try:
            plan = _lowered(repeats.stem(schedule, kept), passes, whole)
        except PlanError:
            break  # the error for all passes will show their own microbatches
        if plan is not None:
            return plan
        kept *= _MORE
    plan = _lowered(schedule, passes)
    assert plan is not None
    return plan


def _lowered(
    schedule: Schedule, passes: Sequence[LoweringPass], finish: Callable[[Plan], Plan | None] = lambda plan: plan
) -> Plan | None:
    """Apply the passes to a schedule, and ``finish`` to the result; None if ``finish`` returns None."""
    plan = Plan.bare(schedule)
    for lowering_pass in passes[:-1]:
        plan = lowering_pass(plan)
        prove(plan)
    finished = finish(passes[-1](plan))
    if finished is not None:
        prove(finished)
    return finished


def lower_forward_only(schedule: Schedule) -> Plan:
    """Lower the schedule of an evaluation. It may send in one direction only, so no returning message shows that a
    buffer is free; each channel gets as few buffers as the proof allows.
    """
    forwards = schedule.forward_only()
    for most in (2, schedule.num_ranks + 1, 2 * schedule.num_ranks + 1):
        try:
            return lower(forwards, (partial(communicate, max_in_flight=most),))
        except PlanError:
            continue
    return lower(forwards)

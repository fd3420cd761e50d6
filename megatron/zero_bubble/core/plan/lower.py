"""Lower a schedule to a plan by a list of lowering passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Plan, Schedule
from megatron.zero_bubble.core.ir.garbage import without_gc
from megatron.zero_bubble.core.ir.repeats import find_repeats
from megatron.zero_bubble.core.plan.communicate import communicate
from megatron.zero_bubble.core.plan.prove import prove
from megatron.zero_bubble.core.plan.unroll import is_alike, unroll

LoweringPass = Callable[[Plan], Plan]
"""A lowering pass that treats all microbatches alike declares it (``alike``), so that plans store what repeats once."""
Proof = Callable[[Plan], object]
"""Proves that a plan can run, or raises ``PlanError``."""

_KEPT, _MORE = 6, 2
"""Windows in the stem of a plan in addition to their lag, and the factor by which they grow until its ops repeat."""


@without_gc()
def lower(schedule: Schedule, passes: Sequence[LoweringPass] = (communicate,), proof: Proof = prove) -> Plan:
    """Turn a valid schedule into the ops of every rank, and prove that the plan can run.

    The steady state of a schedule, which repeats the same passes, is lowered and proved only once, if every lowering
    pass is ``alike``.

    Args:
        schedule: any schedule that ``analysis.validate`` accepts.
        passes: lowering passes; each adds ops to the plan of the previous one.
        proof: how the plan is proved.

    Raises:
        PlanError: when an op lacks an input, a resource is never released, or the ranks would wait for each other; the
            message shows the position of each rank.
    """
    plan = unproved(schedule, passes)
    proof(plan)
    return plan


@without_gc()
def unproved(schedule: Schedule, passes: Sequence[LoweringPass]) -> Plan:
    """Return the plan of ``lower``, for what can be counted without a proof that it runs."""
    return _lowered_once(schedule, passes) or reduce(lambda plan, run: run(plan), passes, Plan.bare(schedule))


def _lowered_once(schedule: Schedule, passes: Sequence[LoweringPass]) -> Plan | None:
    """Lower the stem of a schedule, and insert the windows that it lacks; None if the schedule or its ops do not repeat
    themselves.
    """
    if not passes or not all(map(is_alike, passes)):
        return None
    repeats, kept = find_repeats(schedule), _KEPT
    while repeats is not None and 2 * (repeats.lag + kept) <= repeats.copies:
        windows = repeats.lag + kept
        try:
            stem = reduce(lambda plan, run: run(plan), passes, Plan.bare(repeats.stem(schedule, windows)))
        except PlanError:
            return None  # the error for the whole schedule shows its own microbatches
        if (plan := unroll(stem, schedule, repeats, windows)) is not None:
            return plan
        kept *= _MORE
    return None

"""Lower a schedule to a plan by a list of lowering passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Plan, Schedule
from megatron.zero_bubble.core.ir.garbage import without_gc
from megatron.zero_bubble.core.ir.repeats import find_repeats
from megatron.zero_bubble.core.plan.collect import collect
from megatron.zero_bubble.core.plan.communicate import PostReceives, communicate
from megatron.zero_bubble.core.plan.offload import Move, offload
from megatron.zero_bubble.core.plan.post_validation import with_validation
from megatron.zero_bubble.core.plan.prove import prove
from megatron.zero_bubble.core.plan.shard import Sharding, shard
from megatron.zero_bubble.core.plan.turns import in_turn
from megatron.zero_bubble.core.plan.unroll import is_alike, unroll

LoweringPass = Callable[[Plan], Plan]
"""A lowering pass that treats all microbatches alike declares it (``alike``), so that plans store what repeats once."""

_KEPT, _MORE = 6, 2
"""Windows in the stem of a plan in addition to their lag, and the factor by which they grow until its ops repeat."""


@without_gc()
def lower(schedule: Schedule, passes: Sequence[LoweringPass] = (communicate,)) -> Plan:
    """Turn a valid schedule into the ops of every rank, and prove after every lowering pass that the plan can run.

    The steady state of a schedule, which repeats the same passes, is lowered and proved only once, if every lowering
    pass is ``alike``.

    Args:
        schedule: any schedule that ``analysis.validate`` accepts.
        passes: lowering passes; each adds ops to the plan of the previous one.

    Raises:
        PlanError: when an op lacks an input, a resource is never released, or the ranks would wait for each other; the
            message shows the position of each rank.
    """
    return _lowered_once(schedule, passes) or _lowered(schedule, passes)


def _lowered(schedule: Schedule, passes: Sequence[LoweringPass]) -> Plan:
    plan = Plan.bare(schedule)
    for lowering_pass in passes:
        plan = lowering_pass(plan)
        prove(plan)
    return plan


def _lowered_once(schedule: Schedule, passes: Sequence[LoweringPass]) -> Plan | None:
    """Lower and prove the stem of a schedule, and insert the windows that it lacks; None if the schedule or its ops do
    not repeat themselves.
    """
    if not passes or not all(map(is_alike, passes)):
        return None
    repeats, kept = find_repeats(schedule), _KEPT
    while repeats is not None and 2 * (repeats.lag + kept) <= repeats.copies:
        windows = repeats.lag + kept
        try:
            stem = passes[-1](_lowered(repeats.stem(schedule, windows), passes[:-1]))
        except PlanError:
            return None  # the error for the whole schedule shows its own microbatches
        if (plan := unroll(stem, schedule, repeats, windows)) is not None:
            prove(plan)
            return plan
        kept *= _MORE
    return None


def lower_forward_only(
    schedule: Schedule,
    post_receives: PostReceives = "early",
    sharding: Sharding | None = None,
    more: Sequence[LoweringPass] = (),
) -> Plan:
    """Lower the schedule of an evaluation. It may send in one direction only, so no returning message shows that a
    buffer is free; each channel gets as few buffers as the proof allows.

    Args:
        post_receives: see ``communicate``.
        sharding: see ``lower_training``.
        more: see ``lower_training``.
    """
    forwards, transfers = schedule.forward_only(), partial(communicate, post_receives=post_receives)
    more = [*([] if sharding is None else [partial(shard, sharding=sharding)]), *more]
    for most in (2, schedule.num_ranks + 1, 2 * schedule.num_ranks + 1):
        try:
            return lower(forwards, (collect, partial(transfers, max_in_flight=most), in_turn, *more))
        except PlanError:
            continue
    return lower(forwards, (collect, transfers, in_turn, *more))


def lower_training(
    schedule: Schedule,
    post_receives: PostReceives = "early",
    post_validation: bool = False,
    moves: Collection[Move] = (),
    sharding: Sharding | None = None,
    more: Sequence[LoweringPass] = (),
) -> Plan:
    """Lower the schedule of a training iteration.

    Args:
        post_receives: see ``communicate``.
        post_validation: whether the iteration validates the previous optimizer step.
        moves: what leaves the device between forward and backward.
        sharding: how chunks are sharded over their replicas; None if each replica has all of them.
        more: lowering passes that follow.
    """
    passes: list[LoweringPass] = [collect, partial(communicate, post_receives=post_receives), in_turn]
    if post_validation:
        passes.append(with_validation)
    if moves:
        passes.append(partial(offload, moves=moves))
    if sharding is not None:
        passes.append(partial(shard, sharding=sharding))
    return lower(schedule, [*passes, *more])

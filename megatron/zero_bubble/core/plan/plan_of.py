"""The plan of a schedule: all its lowering passes, in one list.

The planner, a dry run, a plan file and a run all lower by this list, so that what the planner simulates is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Plan, Schedule
from megatron.zero_bubble.core.plan.collect import collect, start_collectives
from megatron.zero_bubble.core.plan.communicate import PostReceives, communicate
from megatron.zero_bubble.core.plan.lower import LoweringPass, Proof, lower, unproved
from megatron.zero_bubble.core.plan.offload import Move, offload
from megatron.zero_bubble.core.plan.post_validation import with_validation
from megatron.zero_bubble.core.plan.prove import prove
from megatron.zero_bubble.core.plan.shard import Sharding, shard
from megatron.zero_bubble.core.plan.turns import in_turn


@dataclass(frozen=True)
class Additions:
    """What a plan has in addition to the passes of its schedule and their messages.

    Attributes:
        post_receives: see ``communicate``.
        post_validation: whether the iteration validates the previous optimizer step.
        moves: what leaves the device between forward and backward.
        sharding: how chunks are sharded over their replicas; None if each replica has all of them.
        more: lowering passes that follow.
    """

    post_receives: PostReceives = "early"
    post_validation: bool = False
    moves: tuple[Move, ...] = ()
    sharding: Sharding | None = None
    more: tuple[LoweringPass, ...] = ()

    @property
    def ops(self) -> list[LoweringPass]:
        """The lowering passes that add ops to ranks on their own."""
        moved: list[LoweringPass] = [partial(offload, moves=self.moves)] if self.moves else []
        sharded: list[LoweringPass] = [] if self.sharding is None else [partial(shard, sharding=self.sharding)]
        return [*moved, *sharded, *self.more]


NOTHING = Additions()


def plan_of(schedule: Schedule, added: Additions = NOTHING, proof: Proof = prove) -> Plan:
    """Lower the schedule of a training iteration, and prove that its plan can run.

    Raises:
        PlanError: see ``lower``.
    """
    return lower(schedule, _of_training(added), proof)


def unproved_plan_of(schedule: Schedule, added: Additions = NOTHING) -> Plan:
    """Return the plan of ``plan_of``, for what can be counted without a proof that it runs."""
    return unproved(schedule, _of_training(added))


def plan_without_messages(schedule: Schedule, added: Additions = NOTHING) -> Plan:
    """Return the plan by which times and memory are compared: values move between ranks without ops. It is not proved,
    and validates no optimizer step.
    """
    return unproved(schedule, [collect, *added.ops])


def plan_of_times(schedule: Schedule) -> Plan:
    """Return the plan by which the times of a schedule alone are compared. What ranks give to collectives is not freed:
    that delays nothing (``finish``), and takes as long to plan as the collectives.
    """
    return unproved(schedule, [start_collectives])


def plan_of_evaluation(schedule: Schedule, added: Additions = NOTHING, proof: Proof = prove) -> Plan:
    """Lower the forwards of a schedule, in which nothing moves to the host, and prove that their plan can run.

    An evaluation may send in one direction only, so no returning message shows that a buffer is free; each channel gets
    as few buffers as the proof allows.

    Raises:
        PlanError: see ``lower``.
    """
    forwards, own = schedule.forward_only(), replace(added, moves=()).ops
    transfers = partial(communicate, post_receives=added.post_receives)
    for most in (2, schedule.num_ranks + 1, 2 * schedule.num_ranks + 1):
        try:
            return lower(forwards, (collect, partial(transfers, max_in_flight=most), in_turn, *own), proof)
        except PlanError:
            continue
    return lower(forwards, (collect, transfers, in_turn, *own), proof)


def _of_training(added: Additions) -> list[LoweringPass]:
    validates = [with_validation] if added.post_validation else []
    return [collect, partial(communicate, post_receives=added.post_receives), in_turn, *validates, *added.ops]

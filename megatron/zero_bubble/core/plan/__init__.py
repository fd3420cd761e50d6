"""Lower a schedule to the ops of each rank, with sends and receives, and prove them free of deadlock."""

from megatron.zero_bubble.core.plan.communicate import PostReceives, communicate
from megatron.zero_bubble.core.plan.lower import LoweringPass, lower
from megatron.zero_bubble.core.plan.plan_of import (
    NOTHING,
    Additions,
    plan_of,
    plan_of_evaluation,
    plan_without_messages,
    unproved_plan_of,
)
from megatron.zero_bubble.core.plan.post_validation import with_validation
from megatron.zero_bubble.core.plan.prove import Queues, prove, prove_for_queues
from megatron.zero_bubble.core.plan.slots import Slots, num_slots, slots
from megatron.zero_bubble.core.plan.unroll import alike

__all__ = [
    "NOTHING",
    "Additions",
    "LoweringPass",
    "PostReceives",
    "Queues",
    "Slots",
    "alike",
    "communicate",
    "lower",
    "num_slots",
    "plan_of",
    "plan_of_evaluation",
    "plan_without_messages",
    "prove",
    "prove_for_queues",
    "slots",
    "unproved_plan_of",
    "with_validation",
]

"""Lower a schedule to the ops of each rank, with sends and receives, and prove them free of deadlock."""

from megatron.zero_bubble.core.plan.communicate import PostReceives, communicate
from megatron.zero_bubble.core.plan.lower import LoweringPass, lower, lower_forward_only, lower_training
from megatron.zero_bubble.core.plan.post_validation import with_validation
from megatron.zero_bubble.core.plan.prove import Queues, prove, prove_for_queues
from megatron.zero_bubble.core.plan.unroll import alike

__all__ = [
    "LoweringPass",
    "PostReceives",
    "Queues",
    "alike",
    "communicate",
    "lower",
    "lower_forward_only",
    "lower_training",
    "prove",
    "prove_for_queues",
    "with_validation",
]

"""From a schedule to what each rank executes: ops with their sends and receives, proved free of deadlock."""

from megatron.zero_bubble.errors import PlanError
from megatron.zero_bubble.plan.communicate import lower, lower_forward_only
from megatron.zero_bubble.plan.ops import Compute, Message, Op, Plan, Recv, Send, Settle, Validate
from megatron.zero_bubble.plan.post_validation import with_validation
from megatron.zero_bubble.plan.prove import prove, prove_single_queue

__all__ = [
    "Compute",
    "Message",
    "Op",
    "Plan",
    "PlanError",
    "Recv",
    "Send",
    "Settle",
    "Validate",
    "lower",
    "lower_forward_only",
    "prove",
    "prove_single_queue",
    "with_validation",
]

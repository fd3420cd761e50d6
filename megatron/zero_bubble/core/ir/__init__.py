"""Schedules and plans as plain values: what every rank computes, and in which order.

A ``Pass`` is one unit of compute and prints as ``<stage><kind><microbatch>``, so ``2F0`` is the forward of
microbatch 0 on stage 2; a slice of a sequence other than the first appends ``.<slice>`` (``2F0.1``). Kinds follow the
Zero Bubble paper (arXiv 2401.10241, section 2): F, B (gradient of the input), W (gradient of the weights) and BW, the
fused backward that stock 1F1B runs.

A ``Flow`` defines which values a pass produces and which it uses; a ``Plan`` has the ops of each rank: its passes, and
the ops that move their values between ranks.

Everything here is frozen and hashable, and never stores anything learned at run time.
"""

from megatron.zero_bubble.core.ir.flow import Chain, Flow, Value
from megatron.zero_bubble.core.ir.ops import Compute, Effects, Message, Op, Recv, Send, Settle, Token, Validate
from megatron.zero_bubble.core.ir.pairs import Pair
from megatron.zero_bubble.core.ir.passes import Kind, Pass
from megatron.zero_bubble.core.ir.placement import Placement
from megatron.zero_bubble.core.ir.plan import Plan
from megatron.zero_bubble.core.ir.schedule import Schedule
from megatron.zero_bubble.core.ir.slices import WHOLE, Slices

__all__ = [
    "WHOLE",
    "Chain",
    "Compute",
    "Effects",
    "Flow",
    "Kind",
    "Message",
    "Op",
    "Pair",
    "Pass",
    "Placement",
    "Plan",
    "Recv",
    "Schedule",
    "Send",
    "Settle",
    "Slices",
    "Token",
    "Validate",
    "Value",
]

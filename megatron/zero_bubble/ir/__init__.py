"""The schedule as a plain value: what every rank computes, in which order.

A ``Pass`` is one unit of compute and prints as ``<stage><kind><microbatch>``, so ``2F0`` is the forward of
microbatch 0 on stage 2; a slice of a sequence other than the first appends ``.<slice>`` (``2F0.1``). Kinds follow the
Zero Bubble paper (arXiv 2401.10241, section 2): F, B (gradient of the input), W (gradient of the weights) and BW, the
fused backward that stock 1F1B runs.

Everything here is frozen and hashable. Nothing learnt at run time is ever written into it.
"""

from megatron.zero_bubble.ir.passes import Kind, Pass
from megatron.zero_bubble.ir.placement import Placement
from megatron.zero_bubble.ir.schedule import Schedule

__all__ = ["Kind", "Pass", "Placement", "Schedule"]

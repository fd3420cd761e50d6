"""What a pass costs: time in ms, and memory.

Figures on the command line are per rank, for the rank's whole share of the model; ``uniform`` spreads them over the
rank's chunks. Inside, every stage has its own figure. ``BW = B + W`` is defined here and nowhere else.
"""

from megatron.zero_bubble.costs.memory import PassMemory
from megatron.zero_bubble.costs.passes import PassCosts

__all__ = ["PassCosts", "PassMemory"]

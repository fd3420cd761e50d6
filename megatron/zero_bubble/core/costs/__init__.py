"""Costs of passes: time in ms, and memory.

Figures on the command line are per rank, for the rank's whole share of the model; ``uniform`` divides them among the
rank's chunks. Internally, figures are per stage. Only this package defines ``BW = B + W``.
"""

from megatron.zero_bubble.core.costs.memory import PassMemory
from megatron.zero_bubble.core.costs.passes import PassCosts
from megatron.zero_bubble.core.costs.sequence_tokens import SequenceTokens

__all__ = ["PassCosts", "PassMemory", "SequenceTokens"]

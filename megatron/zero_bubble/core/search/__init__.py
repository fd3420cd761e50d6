"""Schedule search: find the best order of passes for given costs, memory limit and placement."""

from megatron.zero_bubble.core.search.auto import fit, zb_auto

__all__ = ["fit", "zb_auto"]

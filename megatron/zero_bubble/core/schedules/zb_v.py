"""ZB-V: no bubble if F = B = W, within 1F1B's memory (arXiv 2401.10241, section 6).

Rank i has stages i and 2p-1-i: a microbatch runs down the ranks and back up, so the second chunk of the first rank
computes the loss, and its backward needs no other rank. Memory is the same on all ranks.

rank 0 |0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0F3 0B0 0W0 3F2 3B2 3W2 0B1 0W1 3F3 3B3 3W3 0B2 0W2 0B3 0W3 ....|
rank 1 |....1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1F3 1B1 1W1 2F3 2B2 2W2 1B2 2B3 1B3 1W2 2W3 1W3 |
"""

from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.schedules.recipe import Recipe
from megatron.zero_bubble.core.schedules.vee import equal_schedule
from megatron.zero_bubble.core.search.seeds import zb_v


def build(num_ranks: int, num_microbatches: int, _: int = 2) -> Schedule:
    """Build the schedule phase by phase as in the paper, for equal passes."""
    return equal_schedule(RECIPE.name, num_ranks, num_microbatches, zb_v)


RECIPE = Recipe(
    name="zb-v",
    summary="V placement: no bubble if F = B = W, within 1F1B's memory",
    bubble="0 (F=B=W)",
    memory="pM",
    build=build,
    shape="vee",
    adapts=True,
)

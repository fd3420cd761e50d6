"""ZB-Interleaved: no bubble if F = B = W, with the stages, the warm-up and the memory of interleaved 1F1B.

It is ZB-H2 (arXiv 2401.10241, section 3) on a loop. Rank i warms up as Megatron's virtual pipeline does, with 2(p-1-i)
passes and a unit of p microbatches on each chunk but the last; then F and B alternate. The W's of rank i start up to
2i backwards late, so that the last ranks do not wait for the first ones. With at least 2p microbatches, in units of p,
no rank waits between its first and its last pass; with p microbatches, a rank waits (p-1)F/v. With two chunks:

rank 0 |0F0 0F1 2F0 2F1 0F2 2B0 2W0 0F3 2B1 2W1 2F2 0B0 0W0 2F3 0B1 0W1 2B2 2W2 2B3 2W3 0B2 0W2 0B3 0W3 ....|
rank 1 |....1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 3W0 1F3 1B1 3W1 3F2 3B2 1W0 3F3 3B3 1W1 1B2 3W2 1B3 3W3 1W2 1W3 |
"""

from megatron.zero_bubble.core.ir import Placement, Schedule
from megatron.zero_bubble.core.schedules.recipe import Recipe
from megatron.zero_bubble.core.schedules.vee import equal_schedule
from megatron.zero_bubble.core.search.published import zb_interleaved


def build(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Build the schedule for equal passes, within the peak memory of its warm-up."""
    on = Placement.interleaved(num_ranks, num_chunks)
    return equal_schedule(RECIPE.name, num_ranks, num_microbatches, zb_interleaved, on)


RECIPE = Recipe(
    name="zb-interleaved",
    summary="for virtual pipelines, change nothing else: no bubble if F = B = W, in interleaved 1F1B's memory",
    bubble="0 (F=B=W)",
    memory="(p+(p-1)/v)M",
    build=build,
    shape="interleaved",
    adapts=True,
)

"""GIS-H: GIS with units of half as many microbatches (arXiv 2503.01328, section 3), for about half of its memory.

A unit has passed a chunk before its first microbatch returns from the last rank, so the warm-up has gaps. A unit of
fewer than half as many microbatches as ranks would also wait in the steady state. With two chunks and four ranks:

rank 0 |0F0 0F1 ........4F0 4F1 ....................4B0 4W0 ....4B1 4W1 0B0 0W0 0B1 0W1 |
rank 1 |....1F0 1F1 ........5F0 5F1 ............5B0 5W0 ....5B1 5W1 1B0 1W0 1B1 1W1 ....|
rank 2 |........2F0 2F1 ........6F0 6F1 ....6B0 6W0 ....6B1 6W1 2B0 2W0 2B1 2W1 ........|
rank 3 |............3F0 3F1 ........7F0 7B0 7W0 7F1 7B1 7W1 3B0 3W0 3B1 3W1 ............|
"""

from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.schedules.gis import grouped
from megatron.zero_bubble.core.schedules.recipe import Recipe


def build(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Build GIS-H: units of ceil(p/2) microbatches."""
    return grouped(RECIPE.name, num_ranks, num_microbatches, num_chunks, group=(num_ranks + 1) // 2)


RECIPE = Recipe(
    name="gis-h",
    summary="GIS in about half of its memory, with more idle time in the warm-up",
    bubble="(p-1)(F+B)/v+(v-1)p(F+B-W)/(2v)",
    memory="(v+1)pM/(2v)",
    build=build,
    shape="interleaved",
)

"""Seq1F1B: 1F1B whose unit is a slice of a sequence, instead of a microbatch (arXiv 2406.03488).

With n slices, the bubble and the memory are about 1/n of 1F1B's, and few microbatches suffice: even one fills the
pipeline if it has more slices than ranks. A slice attends to all earlier slices of its sequence, so their keys and
values stay until the backward of the first slice. With two slices:

rank 0 |F0-- F0.1 F1-- F1.1 ....................BW0.1---- .....BW0------ .....BW1.1---- BW1------ |
rank 1 |.....F0-- F0.1 F1-- ..........BW0.1---- F1.1 BW0------ .....BW1.1---- BW1------ ..........|
rank 2 |..........F0-- F0.1 BW0.1---- F1-- BW0------ F1.1 BW1.1---- BW1------ ....................|
"""

from megatron.zero_bubble.core.ir import Kind, Schedule, Slices
from megatron.zero_bubble.core.schedules.letters import forward_backward, linear
from megatron.zero_bubble.core.schedules.recipe import DEFAULT_SLICES, Recipe


def build(num_ranks: int, num_microbatches: int, _: int = 1, slices: Slices = DEFAULT_SLICES) -> Schedule:
    """Build Seq1F1B: rank i warms up with p-1-i forwards, and n-1 more to reach the last slice of a sequence."""
    num_slices = len(slices)

    def row(rank: int) -> str:
        return forward_backward(num_microbatches * num_slices, num_ranks - 1 - rank + num_slices - 1)

    return linear(RECIPE.name, num_ranks, num_microbatches, row, Kind.BW, slices)


RECIPE = Recipe(
    name="seq-1f1b",
    summary="1F1B over slices of sequences: about 1/n of its memory and bubble; fused backward",
    bubble="(p-1)(F+B+W)/n",
    memory="(1+(p-1)/n)M",
    build=build,
    sliced=True,
)

"""ZB-H1 over slices of sequences: Seq1F1B with the backward split, so that W fills the gaps.

The order and the memory are those of Seq1F1B (``seq_1f1b.py``), and W lags i slices behind B on rank i, as it lags i
microbatches in ZB-H1. The bubble is (p-1)(F+B-W)/n if the pipeline has at least n+p-1 slices of all microbatches; with
fewer, the backward of the last slice starts before the first rank has enough other passes. With two slices:

rank 0 |F0-- F0.1 F1-- F1.1 ..........B0.1 W0.1 F2-- B0-- W0-- F2.1 B1.1 W1.1 B1-- W1-- B2.1 W2.1 B2-- W2-- |
rank 1 |.....F0-- F0.1 F1-- .....B0.1 F1.1 B0-- W0.1 F2-- B1.1 W0-- F2.1 B1-- W1.1 B2.1 W1-- B2-- W2.1 W2-- |
rank 2 |..........F0-- F0.1 B0.1 F1-- B0-- F1.1 B1.1 W0.1 F2-- B1-- W0-- F2.1 B2.1 W1.1 B2-- W1-- W2.1 W2-- |
"""

from megatron.zero_bubble.core.ir import Schedule, Slices
from megatron.zero_bubble.core.schedules.letters import delay_wgrad, forward_backward, linear
from megatron.zero_bubble.core.schedules.recipe import DEFAULT_SLICES, Recipe


def build(num_ranks: int, num_microbatches: int, _: int = 1, slices: Slices = DEFAULT_SLICES) -> Schedule:
    """Build the split schedule: the order of Seq1F1B, with W passes that lag i backwards behind on rank i."""
    num_slices = len(slices)

    def row(rank: int) -> str:
        warmup = num_ranks - 1 - rank + num_slices - 1
        return delay_wgrad(forward_backward(num_microbatches * num_slices, warmup), lag=rank)

    return linear(RECIPE.name, num_ranks, num_microbatches, row, slices=slices)


RECIPE = Recipe(
    name="seq-zb-h1",
    summary="ZB-H1 over slices of sequences: about 1/n of its memory and bubble; W fills the gaps",
    bubble="(p-1)(F+B-W)/n",
    memory="(1+(p-1)/n)M",
    build=build,
    sliced=True,
)

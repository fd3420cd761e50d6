"""Breadth-first: all microbatches run through one chunk before the next (arXiv 2211.05953, Lamy-Poirier).

Interleaved chunks without 1F1B. It has the least bubble possible with fused backwards but stores every activation, and
it completes the gradients of one chunk at a time, so that data parallelism can reduce them early. Sends run far ahead
of receives, so GPUs need CUDA_DEVICE_MAX_CONNECTIONS above 1. With two chunks and two ranks:

rank 0 |0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 ............2BW0--- 2BW1--- 2BW2--- 2BW3--- 0BW0--- 0BW1--- 0BW2--- 0BW3--- |
rank 1 |....1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3BW0--- 3BW1--- 3BW2--- 3BW3--- 1BW0--- 1BW1--- 1BW2--- 1BW3--- ........|
"""

from megatron.zero_bubble.core.ir import Kind, Pass, Placement, Schedule
from megatron.zero_bubble.core.schedules.recipe import Recipe


def build(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Order each rank: F of all microbatches chunk by chunk, then BW of all microbatches, last chunk first."""
    microbatches, chunks = range(num_microbatches), range(num_chunks)
    order = tuple(
        (
            *(Pass(chunk * num_ranks + rank, Kind.F, m) for chunk in chunks for m in microbatches),
            *(Pass(chunk * num_ranks + rank, Kind.BW, m) for chunk in reversed(chunks) for m in microbatches),
        )
        for rank in range(num_ranks)
    )
    return Schedule(RECIPE.name, Placement.interleaved(num_ranks, num_chunks), num_microbatches, order)


RECIPE = Recipe(
    name="breadth-first",
    summary="v chunks per rank; all microbatches run through one chunk before the next",
    bubble="(p-1)(F+B+W)/v",
    memory="mM",
    build=build,
    shape="interleaved",
)

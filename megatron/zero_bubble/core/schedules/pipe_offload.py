"""PipeOffload's order (arXiv 2503.01328, section 3): every microbatch enters the pipeline v passes after the last.

It repeats GIS-H's path of one microbatch at equal distances, "uniform repeating". Lifespans then differ by chunk as
much as they can: those of the first chunk are the longest, and moving the longer half of them to host memory leaves
about a quarter of the peak. Without offloading, GIS-H has a smaller bubble in as much memory. With two chunks:

rank 0 |0F0 ....2F0 0F1 ....2B0 2W0 2F1 0B0 0W0 0F2 2B1 2W1 2F2 0B1 0W1 ....2B2 2W2 0B2 0W2 |
rank 1 |....1F0 ....3F0 3B0 3W0 1F1 1B0 1W0 3F1 3B1 3W1 1F2 1B1 1W1 3F2 3B2 3W2 1B2 1W2 ....|
"""

from __future__ import annotations

from megatron.zero_bubble.core.ir import Kind, Pass, Placement, Schedule
from megatron.zero_bubble.core.schedules.recipe import Recipe

_PASSES = 3
"""F, B and W of a chunk: the time between two microbatches is v times as long."""


def build(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Order the passes of every rank by the times at which they run in the steady state, if all passes are equal."""
    offsets = _offsets(num_chunks, (num_ranks + 1) // 2)
    order = tuple(_row(rank, num_ranks, num_microbatches, offsets) for rank in range(num_ranks))
    return Schedule(RECIPE.name, Placement.interleaved(num_ranks, num_chunks), num_microbatches, order)


def _offsets(num_chunks: int, least: int) -> list[int]:
    """For every chunk, when a microbatch begins it, in turns of F, B and W: at least ``least`` turns after the chunk
    before, and so that the chunks of different microbatches do not need the same turn.
    """
    offsets = [0]
    while len(offsets) < num_chunks:
        offset = offsets[-1] + least
        while offset % num_chunks in {each % num_chunks for each in offsets}:
            offset += 1
        offsets.append(offset)
    return offsets


def _row(rank: int, num_ranks: int, num_microbatches: int, offsets: list[int]) -> tuple[Pass, ...]:
    num_chunks = len(offsets)
    # The first backward follows the last forward of its microbatch at once. Forwards travel one rank per pass,
    # backwards one rank per two passes, because a W follows each.
    turn = _PASSES * offsets[-1] + num_ranks
    timed = []
    for microbatch in range(num_microbatches):
        for chunk, there, back in zip(range(num_chunks), offsets, reversed(offsets), strict=True):
            stage, entered = chunk * num_ranks + rank, _PASSES * num_chunks * microbatch
            backward_at = turn + _PASSES * back + 2 * (num_ranks - 1 - rank) + entered
            timed += [
                (_PASSES * there + rank + entered, Pass(stage, Kind.F, microbatch)),
                (backward_at, Pass(stage, Kind.B, microbatch)),
                (backward_at + 1, Pass(stage, Kind.W, microbatch)),
            ]
    return tuple(p for _, p in sorted(timed, key=lambda each: each[0]))


RECIPE = Recipe(
    name="pipe-offload",
    summary="made for offloading: microbatches at equal distances, so that the first chunks are kept longest",
    bubble="<(p-1)(F+B+W)",
    memory="~(v+1)pM/(2v)",
    build=build,
    shape="interleaved",
)

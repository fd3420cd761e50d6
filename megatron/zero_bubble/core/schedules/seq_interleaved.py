"""Interleaved 1F1B over slices of sequences: Seq1F1B with v chunks per rank (arXiv 2406.03488, section 3.4).

Units of p slices run through one chunk after the other, as units of p microbatches do in interleaved 1F1B; rank i warms
up with 2(p-1-i) passes, a unit of each chunk but the last, and as many as the last slice of a sequence is behind the
first, because the backward begins with the last slice. With two chunks and two slices:

rank 0 |0F0-- 0F0.1 2F0-- 2F0.1 ..................2BW0.1----- 2BW0------- 0BW0.1----- 0BW0------- |
rank 1 |......1F0-- 1F0.1 3F0-- 3F0.1 3BW0.1----- 3BW0------- 1BW0.1----- 1BW0------- ............|
"""

from megatron.zero_bubble.core.ir import Kind, Pass, Placement, Schedule, Slices
from megatron.zero_bubble.core.schedules.interleaved import units
from megatron.zero_bubble.core.schedules.letters import forward_backward
from megatron.zero_bubble.core.schedules.recipe import DEFAULT_SLICES, Recipe


def build(num_ranks: int, num_microbatches: int, num_chunks: int = 2, slices: Slices = DEFAULT_SLICES) -> Schedule:
    """Order each rank as interleaved 1F1B orders microbatches, with slices in their place."""
    placement = Placement.interleaved(num_ranks, num_chunks)
    order = tuple(_row(rank, num_ranks, num_microbatches, num_chunks, len(slices)) for rank in range(num_ranks))
    return Schedule(RECIPE.name, placement, num_microbatches, order, slices)


def _row(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int, num_slices: int) -> tuple[Pass, ...]:
    microbatches, slices, chunks = range(num_microbatches), range(num_slices), range(num_chunks)
    forwards = [
        (c, m, s)
        for unit in units([(m, s) for m in microbatches for s in slices], num_ranks)
        for c in chunks
        for m, s in unit
    ]
    backwards = [
        (c, m, s)
        for unit in units([(m, s) for m in microbatches for s in reversed(slices)], num_ranks)
        for c in reversed(chunks)
        for m, s in unit
    ]
    # The last rank must have run every forward before its backward; every earlier rank is two passes ahead of the next.
    place = {one: at for at, one in enumerate(forwards)}
    lead = max(place[one] - at for at, one in enumerate(backwards))
    letters = forward_backward(len(forwards), lead + 2 * (num_ranks - 1 - rank))
    rows = {"F": iter(forwards), "B": iter(backwards)}
    kinds = {"F": Kind.F, "B": Kind.BW}
    row = ((kinds[letter], *next(rows[letter])) for letter in letters)
    return tuple(Pass(c * num_ranks + rank, kind, m, s) for kind, c, m, s in row)


RECIPE = Recipe(
    name="seq-interleaved-1f1b",
    summary="Interleaved 1F1B over slices of sequences; the shortest bubble per slice without splitting the backward",
    bubble="(p-1)(F+B+W)/(nv)",
    memory="(1+2(p-1)/(nv))M",
    build=build,
    shape="interleaved",
    sliced=True,
)

"""GIS, the generalized interleaved schedule (arXiv 2503.01328, section 3): interleaved 1F1B with split backwards.

Units of p microbatches run through one chunk after the other, as in interleaved 1F1B. Only B, the input gradient,
delays the previous stage, so a rank warms up with p-1-i passes fewer and keeps pv chunks at most; W directly follows
its B, so no operands of W accumulate. With two chunks:

rank 0 |0F0 0F1 2F0 2F1 ....2B0 2W0 0F2 2B1 2W1 0F3 0B0 0W0 2F2 0B1 0W1 2F3 2B2 2W2 ....2B3 2W3 0B2 0W2 0B3 0W3 |
rank 1 |....1F0 1F1 3F0 3B0 3W0 3F1 3B1 3W1 1F2 1B0 1W0 1F3 1B1 1W1 3F2 3B2 3W2 3F3 3B3 3W3 1B2 1W2 1B3 1W3 ....|
"""

from __future__ import annotations

from itertools import pairwise

from megatron.zero_bubble.core.ir import Kind, Pass, Placement, Schedule
from megatron.zero_bubble.core.schedules.letters import forward_backward
from megatron.zero_bubble.core.schedules.recipe import Recipe


def build(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Build GIS: units of p microbatches."""
    return grouped(RECIPE.name, num_ranks, num_microbatches, num_chunks, group=num_ranks)


def grouped(name: str, num_ranks: int, num_microbatches: int, num_chunks: int, group: int) -> Schedule:
    """Build GIS for units of ``group`` microbatches.

    If ``group`` divides the number of microbatches, a rank keeps at most g(v-1)+p chunks, and in units of one pass of
    one chunk with F = B = W, the bubble is 2(p-1) + (p-g)(v-1).

    Args:
        group: from ceil(p/2) to p; smaller units wait for the other ranks not only in the warm-up.
    """
    assert (num_ranks + 1) // 2 <= group <= num_ranks, f"units of {group} microbatches on {num_ranks} ranks"
    units = _units(num_microbatches, group, (num_ranks + 1) // 2)
    order = tuple(_row(rank, num_ranks, units, num_chunks) for rank in range(num_ranks))
    return Schedule(name, Placement.interleaved(num_ranks, num_chunks), num_microbatches, order)


def _units(num_microbatches: int, group: int, least: int) -> list[range]:
    """Divide the microbatches into units of about the same size: at most ``group``, unless some would be smaller than
    ``least``.
    """
    number = -(-num_microbatches // group)
    if num_microbatches < number * least:
        number = max(1, number - 1)
    firsts = [num_microbatches * unit // number for unit in range(number + 1)]
    return [range(first, end) for first, end in pairwise(firsts)]


def _row(rank: int, num_ranks: int, units: list[range], num_chunks: int) -> tuple[Pass, ...]:
    chunks = range(num_chunks)
    forwards = [Pass(chunk * num_ranks + rank, Kind.F, m) for unit in units for chunk in chunks for m in unit]
    backwards = [
        Pass(chunk * num_ranks + rank, Kind.B, m) for unit in units for chunk in reversed(chunks) for m in unit
    ]
    warmup = (num_chunks - 1) * max(map(len, units)) + num_ranks - 1 - rank
    rows = {"F": iter(forwards), "B": iter(backwards)}
    passes = [next(rows[letter]) for letter in forward_backward(len(forwards), warmup)]
    return tuple(each for p in passes for each in ((p, p._replace(kind=Kind.W)) if p.kind is Kind.B else (p,)))


RECIPE = Recipe(
    name="gis",
    summary="interleaved 1F1B with W right behind B: 1F1B's memory with a smaller bubble",
    bubble="(p-1)(F+B)/v",
    memory="pM",
    build=build,
    shape="interleaved",
)

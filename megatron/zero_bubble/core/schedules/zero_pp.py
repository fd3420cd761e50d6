"""ZeroPP's units (arXiv 2402.03791): breadth-first order for U microbatches at a time, with split backwards.

Within a unit, all microbatches run through one chunk before the next, so that sharded weights are gathered once per
chunk and unit, and gradients are reduced once (``plan.shard``). The first ranks wait where a unit turns from forwards
to backwards, and the last ranks where the next unit begins, (p-1)(F+B)/v together on every rank. Each unit therefore
leaves as many W's as fill both for the next unit; they take 2(p-1)M/v of memory at the most. One unit of all
microbatches is the breadth-first order (arXiv 2211.05953) with split backwards. With two chunks and units of two:

rank 0 |0F0 0F1 2F0 2F1 ........2B0 2B1 2W0 2W1 0B0 0B1 0F2 0F3 2F2 2F3 0W0 0W1 2B2 2B3 2W2 2W3 0B2 0B3 0W2 0W3 |
rank 1 |....1F0 1F1 3F0 3F1 3B0 3B1 3W0 3W1 1B0 1B1 1W0 1W1 1F2 1F3 3F2 3F3 3B2 3B3 3W2 3W3 1B2 1B3 1W2 1W3 ....|
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from megatron.zero_bubble.core.ir import Kind, Pass, Placement, Schedule
from megatron.zero_bubble.core.schedules.recipe import Recipe

_GAP = 2
"""F and B, in W's: the passes that a rank waits for per rank between it and the end of the pipeline."""


def build(num_ranks: int, num_microbatches: int, num_chunks: int = 2, unit_microbatches: int | None = None) -> Schedule:
    """Order the units of every rank for equal passes.

    Args:
        unit_microbatches: the most microbatches of a unit (default: one per rank, the fewest that fill the pipeline).
    """
    sizes = unit_sizes(num_microbatches, unit_microbatches or num_ranks)
    order = tuple(tuple(_row(rank, num_ranks, num_chunks, sizes)) for rank in range(num_ranks))
    return Schedule(RECIPE.name, Placement.interleaved(num_ranks, num_chunks), num_microbatches, order)


def unit_sizes(num_microbatches: int, most: int) -> list[int]:
    """Divide the microbatches into units of ``most``. The remainder is the last unit: a small unit delays the next."""
    full, rest = divmod(num_microbatches, most)
    return [most] * full + [rest] * (rest > 0)


def _row(rank: int, num_ranks: int, num_chunks: int, sizes: Sequence[int]) -> Iterator[Pass]:
    chunks = range(num_chunks)
    left: deque[Pass] = deque()  # the W's that the unit before has left
    first = 0
    for number, size in enumerate(sizes):
        unit = range(first, first + size)
        first += size

        def passes(kind: Kind, chunk: int, unit: range = unit) -> Iterable[Pass]:
            return (Pass(chunk * num_ranks + rank, kind, m) for m in unit)

        yield from _taken(left, _GAP * rank)
        for chunk in chunks:
            yield from passes(Kind.F, chunk)
        yield from _taken(left, len(left))
        leaves = 0 if number == len(sizes) - 1 else _GAP * (num_ranks - 1)
        runs_at_once = num_chunks * size - leaves
        for chunk in reversed(chunks):
            yield from passes(Kind.B, chunk)
            left.extend(passes(Kind.W, chunk))
            now = max(0, min(len(left), runs_at_once))
            runs_at_once -= now
            yield from _taken(left, now)


def _taken(passes: deque[Pass], number: int) -> list[Pass]:
    taken = list(islice(passes, number))
    for _ in taken:
        passes.popleft()
    return taken


RECIPE = Recipe(
    name="zero-pp",
    summary="for sharded weights: units of U microbatches (default: p), breadth-first, with the W's of a unit in the "
    "gaps of the next",
    bubble="(p-1)(F+B)/v",
    memory="(U+2(p-1)/v)M",
    build=build,
    shape="interleaved",
    has_units=True,
)

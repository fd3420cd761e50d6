"""Interleaved 1F1B, Megatron's virtual pipeline: with plain 1F1B, the baseline for all other schedules.

Rank i has stages i, i+p, i+2p, ..., and units of p microbatches run through one chunk after the other (Narayanan et
al., arXiv 2104.04473); the last unit also contains the remaining microbatches. With two chunks:

rank 0 |0F0 0F1 2F0 2F1 0F2 ....2BW0--- 0F3 2BW1--- 2F2 0BW0--- 2F3 0BW1--- ....2BW2--- ....2BW3--- 0BW2--- 0BW3--- |
rank 1 |....1F0 1F1 3F0 3BW0--- 3F1 3BW1--- 1F2 1BW0--- 1F3 1BW1--- 3F2 3BW2--- 3F3 3BW3--- 1BW2--- 1BW3--- ........|
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from megatron.zero_bubble.core.ir import Kind, Pass, Placement, Schedule
from megatron.zero_bubble.core.schedules.letters import forward_backward
from megatron.zero_bubble.core.schedules.recipe import Recipe

_Item = TypeVar("_Item")


def build(num_ranks: int, num_microbatches: int, num_chunks: int = 2, pairs: bool = False) -> Schedule:
    """Order each rank as Megatron does: rank i warms up with 2(p-1-i) passes and a unit of each chunk but the last.

    With ``pairs``, the F and BW of the steady state run at the same time, after a warm-up that is one F longer, so that
    they do not need each other: the order of Megatron's ``--overlap-moe-expert-parallel-comm``.
    """
    placement = Placement.interleaved(num_ranks, num_chunks)
    rows = [_row(rank, num_ranks, num_microbatches, num_chunks, pairs) for rank in range(num_ranks)]
    together = frozenset(p for row, warmup in rows for p in row[warmup:] if p.kind is Kind.F) if pairs else frozenset()
    return Schedule(RECIPE.name, placement, num_microbatches, tuple(row for row, _ in rows), pairs=together)


def units(items: Sequence[_Item], size: int) -> list[Sequence[_Item]]:
    """Divide ``items`` into units of ``size``; the last unit also contains the remainder."""
    firsts = range(0, max(1, len(items) - size + 1), size)
    return [items[first:end] for first, end in pairwise((*firsts, len(items)))]


def _row(
    rank: int, num_ranks: int, num_microbatches: int, num_chunks: int, pairs: bool
) -> tuple[tuple[Pass, ...], int]:
    """The passes of a rank, and how many of them are its warm-up."""
    chunks = range(num_chunks)
    parts = units(range(num_microbatches), num_ranks)
    forwards = (Pass(chunk * num_ranks + rank, Kind.F, m) for unit in parts for chunk in chunks for m in unit)
    backwards = (
        Pass(chunk * num_ranks + rank, Kind.BW, m) for unit in parts for chunk in reversed(chunks) for m in unit
    )
    warmup = 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * max(map(len, parts)) + pairs
    letters = forward_backward(num_microbatches * num_chunks, warmup)
    return tuple(next(forwards if letter == "F" else backwards) for letter in letters), warmup


RECIPE = Recipe(
    name="interleaved-1f1b",
    summary="1F1B with v chunks per rank (Megatron's virtual pipeline); the best without splitting the backward",
    bubble="(p-1)(F+B+W)/v",
    memory="(p+(p-1)/v)M",
    build=build,
    shape="interleaved",
    has_pairs=True,
)

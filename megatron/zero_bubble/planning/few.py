"""Few microbatches in place of many: in its steady state, a schedule by name repeats itself after one per rank.

Figures that are extended from those of few microbatches are exact up to rounding where the steady state has begun by
then. If passes are uneven, it may begin later, because delays add up; a length is then too short, and hardly ever too
long. So of several schedules, the shortest is found by planning with all microbatches what seems to be the shortest,
until that has been planned already.
"""

from __future__ import annotations

from collections.abc import Sequence

_PER_RANK = 3
"""Microbatches per rank that a warm-up, a steady state and a cool-down take."""
_WORTH = 0.75
"""The share of the microbatches up to which plans of two smaller numbers are worth it."""


def few(num_ranks: int, num_microbatches: int) -> int:
    """A number of microbatches that stands for a larger one: as many fewer as there are whole units of one per rank."""
    units = num_microbatches // num_ranks
    return num_microbatches - max(0, units - _PER_RANK) * num_ranks


def two_numbers(num_ranks: int, num_microbatches: int) -> tuple[int, int] | None:
    """Two numbers of microbatches from whose figures those of all can be extended; None if that saves little."""
    longer = few(num_ranks, num_microbatches)
    counts = longer - num_ranks, longer
    return counts if sum(counts) <= _WORTH * num_microbatches else None


def extended(first: Sequence[float], second: Sequence[float], counts: tuple[int, int], count: int) -> tuple[float, ...]:
    """Figures of ``count`` microbatches, from those of the two numbers ``counts``, which grow evenly from there on."""
    share = (count - counts[1]) / (counts[1] - counts[0])
    return tuple(after + share * (after - before) for before, after in zip(first, second, strict=True))

"""How many microbatches a unit has, where the user leaves it open.

Larger units gather and reduce less often, smaller ones keep fewer activations. Units of fewer microbatches than ranks
do not fill the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

from megatron.zero_bubble.core.analysis.score import ROUNDING, excess, is_less
from megatron.zero_bubble.planning.score import Score, best

T = TypeVar("T")


def unit_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """The sizes to choose from, ascending: as many equal units as there can be of a microbatch per rank, or fewer."""
    most = max(1, num_microbatches // num_ranks)
    return sorted({-(-num_microbatches // units) for units in range(1, most + 1)})


def smallest(sizes: Sequence[int], length_ms: Callable[[int], float]) -> int:
    """The smallest of ``sizes`` that takes no longer than the largest."""
    most = length_ms(sizes[-1]) * (1 + ROUNDING)
    return next((size for size in sizes[:-1] if length_ms(size) <= most), sizes[-1])


def best_within(
    num_ranks: int,
    num_microbatches: int,
    make: Callable[[int], T],
    figures: Callable[[T], tuple[float, float]],
    limit: float = inf,
) -> T:
    """The shortest plan within a memory limit, of these the one with the smallest units.

    Where no plan is within the limit, the one that needs the least memory.

    Args:
        make: makes the plan for a size of units.
        figures: the length of a plan in ms, and its peak of memory in the unit of ``limit``.
    """
    sizes = unit_sizes(num_ranks, num_microbatches)
    if limit < inf:  # units smaller than the pipeline keep less, and wait more
        sizes = [*(size for size in range(1, sizes[0])), *sizes]
    plans = [make(size) for size in sizes]

    def score(plan: T) -> Score:
        ms, peak = figures(plan)
        over = excess(peak, limit)
        return over, 0.0 if over else ms

    return best(plans, score, is_less).offer

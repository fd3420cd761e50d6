"""Plan many microbatches as a few: search with just enough of them for a steady state, and repeat a part of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from operator import sub

from megatron.zero_bubble.core.analysis.score import ROUNDING
from megatron.zero_bubble.core.ir.repeats import consistent_cut
from megatron.zero_bubble.core.search.loops import loops
from megatron.zero_bubble.core.search.problem import NONE, Problem, Rows

_MOST_RANKS = 32
"""Up to this number of ranks, searching with all microbatches takes at most a second."""
_PER_RANK = 3
"""Microbatches per rank with which to search: warm-up, cool-down, and a steady state between them."""
_STRIDE = 60
"""The number of microbatches left out is a multiple of this, because it has so many divisors: a steady state that
repeats itself after 1 to 6, 10, 12, 15, 20 or 30 microbatches can be repeated to fit.
"""
_ROOMY = 1.25
"""Memory in units of 1F1B's peak, from which on the search needs all microbatches."""
_PLACES = (0.5, 0.4, 0.6)
"""Where to look for the part to repeat, in parts of a row."""


def enough(num_ranks: int, num_microbatches: int) -> int:
    """Return the number of microbatches to search with: all, unless there are many."""
    if num_ranks <= _MOST_RANKS or num_microbatches <= _PER_RANK * num_ranks + _STRIDE:
        return num_microbatches
    return _PER_RANK * num_ranks + (num_microbatches - _PER_RANK * num_ranks) % _STRIDE


def is_roomy(problem: Problem) -> bool:
    """Whether a rank has much more memory than 1F1B needs. W passes can then fall behind a little with every
    microbatch, so that the best schedule has no steady state.
    """
    return problem.room > _ROOMY


class Extension:
    """Extends rows for a few microbatches to all microbatches of a problem.

    Attributes:
        problem: the problem with all microbatches.
        short: the problem with a few.
    """

    def __init__(self, problem: Problem, few: int) -> None:
        self.problem, self.short = problem, problem.shortened(few)
        self._loops = loops(problem)

    def least(self, cost: float) -> float:
        """The least possible cost of rows that cost ``cost`` before they are extended.

        The chain of passes that determines the cost goes through the repeated part on some rank.
        """
        return cost + min(map(sub, self.problem.work, self.short.work))

    def never_waits(self, cost: float, whole_cost: float) -> bool:
        """Whether extending rows by work for the busiest rank has not cost more than this work."""
        return whole_cost - cost <= (1 + ROUNDING) * max(map(sub, self.problem.work, self.short.work))

    def cost(self, rows: Rows) -> float:
        """The cost of rows for all microbatches."""
        return self._loops.evaluate(self._loops.pack(rows))[0]

    def of(self, rows: Rows) -> Rows | None:
        """Repeat a part of the steady state of ``rows``; None if they have none whose length fits.

        The peak memory stays the same: the repeated part has each pass of a rank equally often, so it ends with as many
        microbatches in flight as it begins with.
        """
        positions: list[list[int]] = [[] for _ in range(3 * self.short.num_stages)]
        for row in rows:
            for position, code in enumerate(row):
                positions[code].append(position)
        few = self.short.num_microbatches
        more = self.problem.num_microbatches - few
        per_microbatch = [len(row) // few for row in rows]
        on = self.short.tables
        feeders = ((code, feeder) for code, feeder in enumerate(on.source) if feeder != NONE)
        fed = [(on.rank[code], positions[code], on.rank[feeder], positions[feeder]) for code, feeder in feeders]
        cuts = [consistent_cut([int(place * len(row)) for row in rows], fed) for place in _PLACES]
        for count in range(1, few // 2):
            lengths = [count * length for length in per_microbatch]
            for begins in cuts if more % count == 0 else ():
                if all(map(_repeats, rows, begins, lengths, repeat(count))):
                    return [
                        row[:begin] + row[begin : begin + length] * (more // count) + row[begin:]
                        for row, begin, length in zip(rows, begins, lengths, strict=True)
                    ]
        return None


def repeated(pattern: Callable[[Problem], Rows], problem: Problem) -> Rows:
    """The rows of ``pattern`` for ``problem``, made from those for a few microbatches where this is possible."""
    few = enough(problem.num_ranks, problem.num_microbatches)
    if few < problem.num_microbatches:
        extension = Extension(problem, few)
        rows = extension.of(pattern(extension.short))
        if rows is not None:
            return rows
    return pattern(problem)


def _repeats(row: list[int], begin: int, length: int, count: int) -> bool:
    """Whether the part from ``begin`` on equals the part before it, and has each of its codes ``count`` times."""
    part = row[begin : begin + length]
    return row[max(0, begin - length) : begin] == part and all(part.count(code) == count for code in set(part))

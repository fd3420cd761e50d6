"""Evaluate rows: run every pass as early as its place in the row allows."""

from __future__ import annotations

from typing import NamedTuple

from megatron.zero_bubble.search.problem import Problem, Rows
from megatron.zero_bubble.search.rows import times

INFEASIBLE = float("inf")


class Cost(NamedTuple):
    """The cost (``INFEASIBLE`` for rows that deadlock or do not fit in memory), and its mean over ranks, which
    distinguishes rows whose longest ranks are equal.
    """

    cost: float
    mean: float


def evaluate(problem: Problem, rows: Rows) -> Cost:
    """Compute the cost of ``rows``, in time linear in the number of passes."""
    delta, duration = problem.tables.delta, problem.tables.duration
    for row, limit in zip(rows, problem.limit, strict=True):
        kept = 0.0
        for code in row:
            kept += delta[code]
            if delta[code] > 0 and kept > limit:
                return Cost(INFEASIBLE, INFEASIBLE)
    starts = times(problem, rows).starts
    if any(len(begun) < len(row) for begun, row in zip(starts, rows, strict=True)):
        return Cost(INFEASIBLE, INFEASIBLE)
    costs, mean = [], 0.0  # no sum() of floats in these loops: its rounding depends on the version of Python
    for begun, row, origin in zip(starts, rows, problem.origin, strict=True):
        costs.append(begun[-1] + duration[row[-1]] - origin)
        mean += costs[-1]
    return Cost(max(costs), mean / problem.num_ranks)

"""Evaluate rows: run every pass as early as its place in the row allows."""

from __future__ import annotations

from typing import NamedTuple

from megatron.zero_bubble.core.search.problem import Problem, Rows
from megatron.zero_bubble.core.search.rows import times

INFEASIBLE = float("inf")


class Cost(NamedTuple):
    """The cost (``INFEASIBLE`` for rows that deadlock or do not fit in memory), and its mean over ranks, which
    distinguishes rows whose longest ranks are equal.
    """

    cost: float
    mean: float


def evaluate(problem: Problem, rows: Rows) -> Cost:
    """Compute the cost of ``rows``, in time linear in the number of passes."""
    duration, fused = problem.tables.duration, problem.fused(rows)
    if fused is None:
        return Cost(INFEASIBLE, INFEASIBLE)
    starts = times(problem, rows, fused).starts
    if any(len(begun) < len(row) for begun, row in zip(starts, rows, strict=True)):
        return Cost(INFEASIBLE, INFEASIBLE)
    costs, mean = [], 0.0  # no sum() of floats in these loops: its rounding depends on the version of Python
    for begun, row, origin in zip(starts, rows, problem.origin, strict=True):
        costs.append(begun[-1] + duration[row[-1]] - origin)
        mean += costs[-1]
    return Cost(max(costs), mean / problem.num_ranks)

"""What complete rows cost as they are: every pass in its place, W's included."""

from __future__ import annotations

from megatron.zero_bubble.search.decode import INFEASIBLE, Decoded
from megatron.zero_bubble.search.problem import Problem, Rows
from megatron.zero_bubble.search.timeline import times


def evaluate(problem: Problem, full: Rows) -> Decoded:
    """The cost of rows with W's, ``INFEASIBLE`` where they deadlock or do not fit in memory; linear in the passes."""
    delta, duration = problem.tables.delta, problem.tables.duration
    for row, limit in zip(full, problem.limit, strict=True):
        kept = 0.0
        for code in row:
            kept += delta[code]
            if delta[code] > 0 and kept > limit:
                return Decoded(INFEASIBLE, INFEASIBLE, full)
    starts = times(problem, full).starts
    if any(len(begun) < len(row) for begun, row in zip(starts, full, strict=True)):
        return Decoded(INFEASIBLE, INFEASIBLE, full)
    costs, mean = [], 0.0
    for begun, row, origin in zip(starts, full, problem.origin, strict=True):
        costs.append(begun[-1] + duration[row[-1]] - origin)
        mean += costs[-1]
    return Decoded(max(costs), mean / problem.num_ranks, full)

"""The search of one placement: start from many patterns, densify the promising ones, polish the best."""

from __future__ import annotations

from megatron.zero_bubble.search.decode import decode
from megatron.zero_bubble.search.problem import Problem, Rows
from megatron.zero_bubble.search.seeds import seeds


def search(problem: Problem, effort: float) -> tuple[float, Rows]:
    """The cost and rows (with W's) of the best schedule found on one placement."""
    del effort
    best = min((decode(problem, rows, 0.6) for rows in seeds(problem)), key=lambda found: found[:2])
    return best.cost, best.rows

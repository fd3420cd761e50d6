"""Build the published V schedules: compact a known pattern without raising its peak memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.ir import Placement, Schedule
from megatron.zero_bubble.search.evaluate import INFEASIBLE
from megatron.zero_bubble.search.loops import loops
from megatron.zero_bubble.search.problem import Problem, Rows


def equal_passes(name: str, num_ranks: int, num_microbatches: int, pattern: Callable[[Problem], Rows]) -> Schedule:
    """Build the shortest of three schedules for equal passes: the pattern, the pattern compacted forward in time, and
    that compacted backward in time.
    """
    rows = pattern(_problem(num_ranks, num_microbatches, math.inf))
    problem = _problem(num_ranks, num_microbatches, max(map(_peak, rows)))
    loop = loops(problem)
    found = [loop.pack(rows)]
    for backwards in (False, True):
        denser = loop.compact(found[-1], None, 0.0, backwards)
        if denser is None:
            break
        found.append(denser)
    costs = [loop.evaluate(candidate) for candidate in found]
    assert min(costs)[0] < INFEASIBLE, f"the pattern of {name} runs at {num_ranks} ranks"
    return problem.schedule(name, loop.unpack(found[costs.index(min(costs))]))


def _problem(num_ranks: int, num_microbatches: int, limit: float) -> Problem:
    placement = Placement.vee(num_ranks)
    ones = (1.0,) * placement.num_stages
    costs, memory = PassCosts(ones, ones, ones), PassMemory(ones, ones)
    return Problem.of(placement, num_microbatches, costs, memory, (limit,) * num_ranks, "span")


def _peak(row: list[int]) -> int:
    """Return the peak number of chunk activations on a rank, if only W frees them."""
    return max(accumulate((1, 0, -1)[code % 3] for code in row))

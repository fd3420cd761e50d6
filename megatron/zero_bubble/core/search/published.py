"""The published schedules as rows: they take part in every search, so its result is never longer than one of them.

``core/schedules/`` builds the same orders by name; a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import accumulate

from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search.blocks import vee_block
from megatron.zero_bubble.core.search.evaluate import INFEASIBLE
from megatron.zero_bubble.core.search.extend import Extension, repeated
from megatron.zero_bubble.core.search.loops import loops
from megatron.zero_bubble.core.search.problem import B, F, Problem, Rows, W
from megatron.zero_bubble.core.search.seeds import zb_v
from megatron.zero_bubble.core.search.units import breadth_first, grouped, interleaved, zero_pp

Published = Callable[[Problem], Rows]


def v_half(problem: Problem) -> Rows:
    """The building block of V-Half (arXiv 2405.15362, section 4): down two units per rank, up one."""
    rest = 0 if problem.num_ranks % 2 else 3  # passes would meet on a rank
    return vee_block(problem, period=6, down=2, up=1, top=rest, bottom=2)


def v_min(problem: Problem) -> Rows:
    """The building block of V-Min (arXiv 2405.15362, section 4): down and up one unit per rank."""
    rest = 0 if problem.num_ranks % 3 else 2  # passes would meet on a rank
    return vee_block(problem, period=6, down=1, up=1, top=rest, bottom=1)


def zb_h(problem: Problem, factor: int, lag: int) -> Rows:
    """``factor`` (p-1-i) warm-up forwards on rank i, then F and B in turn; W's start ``lag`` i backwards late.

    (1, 0) is 1F1B with its backwards split, (1, 1) ZB-H1 and (2, 2) ZB-H2 (arXiv 2401.10241, section 3).
    """
    p, m = problem.num_ranks, problem.num_microbatches
    rows = []
    for i in range(p):
        f, b, w = 3 * i + F, 3 * i + B, 3 * i + W
        warmup, late = min(m, factor * (p - 1 - i)), min(m, lag * i)
        turns = [[f, b]] * (m - warmup) + [[b]] * warmup
        row = [f] * warmup
        for number, turn in enumerate(turns):
            row += turn if number < late else [*turn, w]
        rows.append(row + [w] * late)
    return rows


def zb_interleaved(problem: Problem) -> Rows:
    """ZB-H2 with the stages of a loop: the warm-up and the memory of interleaved 1F1B."""
    return interleaved(problem, factor=2, lag=2)


def published(problem: Problem) -> Iterator[Rows]:
    """The published schedules for the placement of ``problem``, and their patterns; not all fit in its memory."""
    p, m = problem.num_ranks, problem.num_microbatches
    if problem.num_stages == p:
        for factor, lag in ((1, 0), (1, 1), (2, 2)):
            yield repeated(partial(zb_h, factor=factor, lag=lag), problem)
    elif problem.is_vee:
        for pattern in (zb_v, v_half, v_min):
            rows, dense = repeated(pattern, problem), equal_passes(problem.placement, m, pattern)
            yield from (rows, dense) if rows != dense else (rows,)
    elif problem.is_loop:
        for loop in (interleaved, partial(interleaved, factor=1, lag=1), zb_interleaved):
            yield repeated(loop, problem)
        yield equal_passes(problem.placement, m, zb_interleaved)
        for group in sorted({(p + 1) // 2, p}):
            yield repeated(partial(grouped, group=group), problem)
        yield from (zero_pp(problem), breadth_first(problem))


def one_is_shorter(than: float, extension: Extension) -> bool:
    """Whether a published schedule, extended, costs less; also if one cannot be extended that might."""
    loop = loops(extension.short)
    for rows in published(extension.short):
        if extension.least(loop.evaluate(loop.pack(rows))[0]) < than:
            longer = extension.of(rows)
            if longer is None or extension.cost(longer) < than:
                return True
    return False


@lru_cache(maxsize=8)
def equal_passes(on: Placement, num_microbatches: int, pattern: Published) -> Rows:
    """A pattern for passes that all take the same time, within the memory that it needs anyway.

    It is the shortest of the pattern itself, compacted forward, and then backward, by span.
    """
    return repeated(partial(_dense, pattern=pattern), on_equal_passes(on, num_microbatches))


def _dense(problem: Problem, pattern: Published) -> Rows:
    rows = pattern(problem)
    problem = on_equal_passes(problem.placement, problem.num_microbatches, max(map(_peak, rows)))
    loop = loops(problem)
    found = [loop.pack(rows)]
    for backwards in (False, True):
        denser = loop.compact(found[-1], None, 0.0, backwards)
        if denser is None:
            break
        found.append(denser)
    costs = [loop.evaluate(candidate) for candidate in found]
    assert min(costs)[0] < INFEASIBLE, f"the pattern runs on {problem.num_ranks} ranks"
    return loop.unpack(found[costs.index(min(costs))])


def on_equal_passes(on: Placement, num_microbatches: int, limit: float = math.inf) -> Problem:
    """A problem whose passes all take one unit and keep one unit; the limit is in these units."""
    ones = (1.0,) * on.num_stages
    costs, memory = PassCosts(ones, ones, ones), PassMemory(ones, ones)
    return Problem.of(Workload(on, num_microbatches), costs, memory, (limit,) * on.num_ranks, "span")


def _peak(row: list[int]) -> int:
    """The largest number of chunks' activations on a rank, where B frees nothing yet."""
    return max(accumulate((1, 0, -1)[code % 3] for code in row))

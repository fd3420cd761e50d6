"""From rows of F and B to a schedule with W's, and its cost: the search's inner loop.

W fills gaps. Before each F and B its start is known, because everything it waits for has been placed: W's that fit
before it run there. One more runs, delaying what follows, when the gap is more than ``eagerness`` of the time it takes,
or when the rank has no idle time left to spend on the way to ``target``. As many as needed run when memory is full.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from megatron.zero_bubble.search.problem import NONE, B, Problem, Rows

INFEASIBLE = float("inf")
_SLACK = 1e-9


class Decoded(NamedTuple):
    """What became of rows: the cost (``INFEASIBLE`` when they deadlock or do not fit in memory), its mean over ranks,
    which tells apart rows whose longest rank is equal, and the rows with W's (a part of them where not feasible).
    """

    cost: float
    mean: float
    rows: Rows


def decode(problem: Problem, rows: Rows, eagerness: float, target: float = INFEASIBLE) -> Decoded:  # noqa: C901 (one hot loop)
    """Run ``rows`` as early as possible, adding W's; linear in the number of passes."""
    _, duration, source, hop, receiver, delta = problem.tables
    ends: list[list[float]] = [[] for _ in duration]
    ends.append([0.0] * problem.num_microbatches)  # code NONE: always there
    num_ranks = problem.num_ranks
    free, kept, position = [0.0] * num_ranks, [0.0] * num_ranks, [0] * num_ranks
    spare = [target + start - problem.work[rank] for rank, start in enumerate(problem.origin)]
    pending: list[deque[int]] = [deque() for _ in range(num_ranks)]
    full: Rows = [[] for _ in range(num_ranks)]
    waits_for = [NONE] * num_ranks
    runnable = list(range(num_ranks))
    while runnable:
        rank = runnable.pop()
        row, out, waiting, limit = rows[rank], full[rank], pending[rank], problem.limit[rank]
        now, held = free[rank], kept[rank]
        for index in range(position[rank], len(row)):
            code = row[index]
            mine, inputs = ends[code], ends[source[code]]
            if len(mine) >= len(inputs):
                position[rank] = index
                waits_for[rank] = source[code]
                break
            arrival = inputs[len(mine)] + hop[code]
            change = delta[code]
            while waiting and (
                now + duration[waiting[0]] <= arrival + _SLACK or (change > 0 and held + change > limit)
            ):
                wgrad = waiting.popleft()
                out.append(wgrad)
                now += duration[wgrad]
                held += delta[wgrad]
            held += change
            if change > 0 and held > limit:
                return Decoded(INFEASIBLE, INFEASIBLE, full)
            if arrival > now:
                gap = arrival - now
                if waiting and (gap > eagerness * duration[waiting[0]] or gap > spare[rank] + _SLACK):
                    wgrad = waiting.popleft()
                    out.append(wgrad)
                    now += duration[wgrad]
                    held += delta[wgrad]
                if arrival > now:
                    spare[rank] -= arrival - now
                    now = arrival
            out.append(code)
            now += duration[code]
            mine.append(now)
            if code % 3 == B:
                waiting.append(code + 1)
            if (other := receiver[code]) != NONE and waits_for[other] == code:
                waits_for[other] = NONE
                runnable.append(other)
        else:
            position[rank] = len(row)
        free[rank], kept[rank] = now, held
    if any(at < len(row) for at, row in zip(position, rows, strict=True)):
        return Decoded(INFEASIBLE, INFEASIBLE, full)
    costs, mean = [], 0.0
    for rank, waiting in enumerate(pending):
        full[rank].extend(waiting)
        rest = 0.0  # no sum() of floats in these loops: how it rounds depends on the version of Python
        for wgrad in waiting:
            rest += duration[wgrad]
        costs.append(free[rank] + rest - problem.origin[rank])
        mean += costs[-1]
    return Decoded(max(costs), mean / num_ranks, full)

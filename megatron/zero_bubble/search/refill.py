"""Refill rows: place the W passes again, in the gaps that the order of F and B leaves.

The start of each F and B is known before it is placed, because everything it waits for has been placed. W passes that
fit before it run there. One more W runs, and delays the following passes, if the gap exceeds the share ``eagerness`` of
its duration, or if the rank has no idle time left to reach ``target``. If memory is full, as many W passes run as
needed.
"""

from __future__ import annotations

from collections import deque

from megatron.zero_bubble.search.problem import NONE, Problem, Rows, W

_SLACK = 1e-9


def refill(problem: Problem, rows: Rows, eagerness: float, target: float) -> Rows | None:  # noqa: C901 (one hot loop)
    """Return the new rows, or None if they deadlock or do not fit; the time is linear in the number of passes."""
    _, duration, source, hop, _, wgrads, receiver, delta = problem.tables
    ends = [*([] for _ in duration), [0.0] * problem.num_microbatches]  # the last is of code NONE: always available
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
            if code % 3 == W:
                continue
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
                return None
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
            if wgrads[code] != NONE:
                waiting.append(wgrads[code])
            if (other := receiver[code]) != NONE and waits_for[other] == code:
                waits_for[other] = NONE
                runnable.append(other)
        else:
            position[rank] = len(row)
        free[rank], kept[rank] = now, held
    if any(at < len(row) for at, row in zip(position, rows, strict=True)):
        return None
    return [out + list(waiting) for waiting, out in zip(pending, full, strict=True)]

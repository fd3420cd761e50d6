"""Refill rows: place the W passes again, in the gaps that the order of F and B leaves.

The start of each F and B is known before it is placed, because everything it waits for has been placed. W passes that
fit before it run there. One more W runs, and delays the following passes, if the gap exceeds the share ``eagerness`` of
its duration, or if the rank has no idle time left to reach ``target``. If memory is full, as many W passes run as
needed; if that is still not enough for a B that leaves more memory than it frees, its backward is fused.

The best eagerness differs between warm-up and cool-down, and from rank to rank. In cool-down, every B on its way to the
first stage inherits the delays of the last ranks, but no rank waits for the first one.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from megatron.zero_bubble.core.search.problem import NONE, F, Problem, Rows, W

_SLACK = 1e-9


class Eagerness(NamedTuple):
    """The share of a W's duration which a gap has to exceed: until the last F of a rank (``warm``) and after it
    (``cool``), on the first and on the last rank; on the ranks between, evenly from one to the other.
    """

    warm_first: float
    warm_last: float
    cool_first: float
    cool_last: float

    @classmethod
    def even(cls, share: float) -> Eagerness:
        """The same share at all times on all ranks."""
        return cls(share, share, share, share)

    def on(self, rank: int, num_ranks: int) -> tuple[float, float]:
        """The shares of a rank, until its last F and after it."""
        part = rank / max(1, num_ranks - 1)
        return (
            self.warm_first + part * (self.warm_last - self.warm_first),
            self.cool_first + part * (self.cool_last - self.cool_first),
        )


def refill(problem: Problem, rows: Rows, eagerness: Eagerness, target: float) -> Rows | None:  # noqa: C901 (a hot loop)
    """Return the new rows, or None if they deadlock or do not fit; the time is linear in the number of passes."""
    _, duration, source, hop, _, wgrads, receiver, delta = problem.tables
    ends = [*([] for _ in duration), [0.0] * problem.num_microbatches]  # the last is of code NONE: always available
    num_ranks = problem.num_ranks
    free, kept, position = [0.0] * num_ranks, [0.0] * num_ranks, [0] * num_ranks
    spare = [target + start - problem.work[rank] for rank, start in enumerate(problem.origin)]
    shares = [eagerness.on(rank, num_ranks) for rank in range(num_ranks)]
    last_forward = [max(index for index, code in enumerate(row) if code % 3 == F) for row in rows]
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
            is_fused = change > 0 and held > limit
            if is_fused and code % 3 == F:
                return None
            if arrival > now:
                gap = arrival - now
                share = shares[rank][index > last_forward[rank]]
                if waiting and (gap > share * duration[waiting[0]] or gap > spare[rank] + _SLACK):
                    wgrad = waiting.popleft()
                    out.append(wgrad)
                    now += duration[wgrad]
                    held += delta[wgrad]
                if arrival > now:
                    spare[rank] -= arrival - now
                    now = arrival
            out.append(code)
            now += duration[code]
            wgrad = wgrads[code]
            if is_fused:
                out.append(wgrad)
                now += duration[wgrad]
                held += delta[wgrad]
            elif wgrad != NONE:
                waiting.append(wgrad)
            mine.append(now)
            if (other := receiver[code]) != NONE and waits_for[other] == code:
                waits_for[other] = NONE
                runnable.append(other)
        else:
            position[rank] = len(row)
        free[rank], kept[rank] = now, held
    if any(at < len(row) for at, row in zip(position, rows, strict=True)):
        return None
    return [out + list(waiting) for waiting, out in zip(pending, full, strict=True)]

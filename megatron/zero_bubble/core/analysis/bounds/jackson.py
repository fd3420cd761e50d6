"""The one-machine bound for jobs with heads and tails, which is applied to the passes of a rank.

A job may start at its ``head``, takes ``length``, and everything ends at least ``tail`` after its end. If jobs may be
interrupted, it is optimal to always run the waiting job with the longest tail (J. R. Jackson, 1955), so the end of that
schedule is a lower bound for a machine without interruptions.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace

Task = tuple[float, float, float]
"""Head, length and tail."""


def one_machine_bound(jobs: Iterable[Task]) -> float:
    """Compute the end of Jackson's preemptive schedule, in O(n log n)."""
    waiting: list[tuple[float, float]] = []
    now = end = 0.0
    for head, length, tail in sorted(jobs):
        # Until the next job arrives, the machine runs the waiting jobs, longest tail first.
        while waiting and now < head:
            first_tail, left = waiting[0]
            spent = head - now
            if left > spent:
                heapreplace(waiting, (first_tail, left - spent))
                now = head
            else:
                heappop(waiting)
                now += left
                end = max(end, now - first_tail)
        now = max(now, head)
        heappush(waiting, (-tail, length))
    while waiting:
        first_tail, left = heappop(waiting)
        now += left
        end = max(end, now - first_tail)
    return end

"""One machine, jobs with heads and tails: the bound that every rank's passes give.

A job may start at its ``head``, takes ``length`` and needs ``tail`` after its end before everything is over. If jobs
may be interrupted, running whichever waiting job has the longest tail is optimal (J. R. Jackson, 1955), so the end of
that schedule is a lower bound for the machine without interruptions.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace

Job = tuple[float, float, float]
"""Head, length and tail."""


def one_machine_bound(jobs: Iterable[Job]) -> float:
    """The end of Jackson's preemptive schedule; O(n log n)."""
    waiting: list[tuple[float, float]] = []
    now = end = 0.0
    for head, length, tail in sorted(jobs):
        # Until the next job arrives the machine works through the longest tails.
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

"""Plan the copies of a rank to host memory and back, so that they delay no pass (arXiv 2503.01328, section 4).

The passes keep their times. The copies of a rank in one direction run one after the other on one lane. A copy to the
host starts as early as its lane allows, and a copy back as late as the backwards allow, because both mean less memory.
Whenever its lane is free, what is needed last is copied to the host, unless a copy back would then be late.

A forward stays on the device if its round trip does not fit between it and its backward, or into the lanes: where a
lane is slower than the passes, this leaves a part of the forwards, spread evenly, and nothing waits.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.memory import highest
from megatron.zero_bubble.core.analysis.score import ROUNDING
from megatron.zero_bubble.core.analysis.timeline import Span
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Kind, Pass, Slices, Value
from megatron.zero_bubble.core.ir.flow import SAVED
from megatron.zero_bubble.core.plan.offload import Lifespan, Move, lifespans


class Interval(NamedTuple):
    """A forward that may move.

    Attributes:
        lifespan: the positions of the forward and its backward in the row.
        ms: time of a copy in one direction.
        size: its memory, in the unit of the memory figures.
        kept_ms: time from the end of the forward to the start of the backward.
    """

    lifespan: Lifespan
    ms: float
    size: float
    kept_ms: float

    @property
    def gain(self) -> float:
        """How long the memory could be free per time on a lane, as a factor."""
        return self.kept_ms / self.ms if self.ms else math.inf


def intervals(row: Sequence[Span], costs: PassCosts, memory: PassMemory, slices: Slices) -> list[Interval]:
    """Return the forwards of a rank that have a backward, in their order."""
    found = []
    known: dict[tuple[int, int], tuple[float, float]] = {}
    for span in lifespans([p for p, _, _ in row]):
        key = span.forward.stage, span.forward.slice
        if key not in known:
            saved = Value(span.forward, SAVED)
            known[key] = costs.copy(saved, slices), memory.size(saved, slices)
        found.append(Interval(span, *known[key], row[span.end].start_ms - row[span.begin].end_ms))
    return found


def of_ops(row: Sequence[Span], pairs: Collection[Pass]) -> Sequence[Span]:
    """The passes of a rank with the times between which their op runs: a copy starts and ends outside of a pair."""
    if not pairs:
        return row
    found = list(row)
    for place, (p, start_ms, _) in enumerate(row):
        if p in pairs:
            following, _, end_ms = row[place + 1]
            found[place : place + 2] = Span(p, start_ms, end_ms), Span(following, start_ms, end_ms)
    return found


def fit_copies(row: Sequence[Span], movable: Sequence[Interval], room: float = math.inf) -> list[Move]:
    """Select what moves out of ``movable``, and when, in time O(n log n) unless copies back queue up.

    Args:
        row: the passes of a rank with their times, which the copies keep.
        movable: in the order of their forwards.
        room: limit of host memory, in the unit of the memory figures.
    """
    return _Lanes(row, room).fit(movable)


class RowMemory:
    """The memory of a rank for any moves of its candidates; it depends only on the order of the ops."""

    def __init__(self, row: Sequence[Span], of_rank: Sequence[Interval], memory: PassMemory, slices: Slices) -> None:
        # Of every pass: what is freed before it, what is then allocated, and its own changes at its start and its end.
        known: dict[tuple[Kind, int, int], tuple[float, float]] = {}
        self._changes: list[float] = []
        for p, _, _ in row:
            key = p.kind, p.stage, p.slice
            if key not in known:
                known[key] = memory.changes(p, slices)
            self._changes += 0.0, 0.0, *known[key]
        self._intervals = {each.lifespan.forward: each for each in of_rank}

    def peak(self, moves: Collection[Move]) -> float:
        """Return the peak with these moves, all of this rank, in the unit of the memory figures."""
        moved = [(move, self._intervals[move.forward]) for move in moves]
        places = [(move.places(interval.lifespan), interval.size) for move, interval in moved]
        return self.peak_without((release, fetch, size) for (_, release, fetch), size in places)

    def peak_without(self, away: Iterable[tuple[int, int, float]]) -> float:
        """Return the peak without these sizes, each from a place in the row to a later one."""
        changes = self._changes.copy()
        for release, fetch, size in away:
            changes[4 * release] -= size
            changes[4 * fetch + 1] += size
        return highest(changes)


class _Away(NamedTuple):
    """A forward on the host or on its way there: the places of its first two ops, and when the first copy ends."""

    interval: Interval
    evict: int
    release: int
    end_ms: float


class _Lanes:
    """The two lanes of one rank, from copy to copy.

    ``_due`` has what must come back, in the order of the backwards, and ``_latest`` when each copy must start if those
    after it are to be in time.
    """

    def __init__(self, row: Sequence[Span], room: float) -> None:
        self._starts = [span.start_ms for span in row]
        self._ends = [span.end_ms for span in row]
        self._rounding = ROUNDING * max(self._ends, default=0.0)
        self._room = room * (1 + ROUNDING)
        self._now = self._out_free = self._back_free = 0.0
        self._due: list[_Away] = []
        self._deadlines: list[float] = []
        self._latest: list[float] = []
        self._fetched: list[float] = []  # when the copies back have started
        self._returning: list[tuple[int, float]] = []  # of what comes back: the place of its backward, and its size
        self._moves: list[Move] = []

    def fit(self, movable: Sequence[Interval]) -> list[Move]:
        ends = [self._ends[each.lifespan.begin] for each in movable]
        waiting: list[tuple[float, int]] = []
        arrived = 0
        while arrived < len(movable) or waiting or self._due:
            while arrived < len(movable) and self._is_past(ends[arrived]):
                heappush(waiting, (-self._deadline(movable[arrived]), arrived))
                arrived += 1
            latest = self._latest[0] if self._due else math.inf
            if self._is_past(latest):
                self._fetch()
                continue
            out = math.inf  # when the lane to the host can go on
            if waiting:
                chosen = movable[waiting[0][1]]
                out = max(self._out_free, self._roomy_ms(chosen.size))
                if self._is_past(out):
                    heappop(waiting)
                    self._evict(chosen)
                    continue
                if out == latest == math.inf:
                    heappop(waiting)  # there will never be room
                    continue
            coming = ends[arrived] if arrived < len(movable) else math.inf
            self._now = max(self._now, min(coming, out, latest))
        return self._moves

    def _is_past(self, ms: float) -> bool:
        return ms <= self._now + self._rounding

    def _deadline(self, interval: Interval) -> float:
        return self._starts[interval.lifespan.end]

    def _place(self, ms: float) -> int:
        """The number of passes that have ended at ``ms``: an op at this place is issued at or before it."""
        return bisect_right(self._ends, ms + self._rounding)

    def _roomy_ms(self, size: float) -> float:
        """When the host has room for ``size``; infinity if that needs a copy back that has not started."""
        while self._returning and self._returning[0][0] < self._place(self._now):
            self._room += heappop(self._returning)[1]
        if size <= self._room:
            return self._now
        return self._ends[self._returning[0][0]] if self._returning else math.inf

    def _evict(self, chosen: Interval) -> None:
        """Start a copy to the host, unless moving only costs memory or a copy back would be late."""
        end = self._now + chosen.ms
        release = bisect_left(self._starts, end - self._rounding)
        deadline = self._deadline(chosen)
        position = bisect_left(self._deadlines, deadline)
        after = self._latest[position] if position < len(self._latest) else math.inf
        latest = min(deadline, after) - chosen.ms
        if latest < end - self._rounding or self._ends[release] > latest + self._rounding:
            return
        earlier = self._pulled(position, latest)
        first = latest if position == 0 else earlier.get(0, self._latest[0])
        if first < max(self._now, self._back_free) - self._rounding:
            return
        for other, ms in earlier.items():
            self._latest[other] = ms
        self._due.insert(position, _Away(chosen, self._place(self._now), release, end))
        self._deadlines.insert(position, deadline)
        self._latest.insert(position, latest)
        self._room -= chosen.size
        self._out_free = end

    def _pulled(self, position: int, latest: float) -> dict[int, float]:
        """The new latest starts of the copies back before ``position``, as far as a start there changes them."""
        pulled = {}
        for other in range(position - 1, -1, -1):
            latest = min(self._deadlines[other], latest) - self._due[other].interval.ms
            if latest >= self._latest[other] - self._rounding:
                break
            pulled[other] = latest
        return pulled

    def _fetch(self) -> None:
        """Start the copy back that is due first."""
        away, fetch = self._due.pop(0), self._place(self._now)
        del self._deadlines[0], self._latest[0]
        self._back_free = self._now + away.interval.ms
        span, release = away.interval.lifespan, self._release(away)
        if release < fetch:  # else it would come back before it is gone
            self._fetched.append(self._now)
            heappush(self._returning, (span.end, away.interval.size))
            out, after = release - away.evict, away.evict - span.begin - 1
            self._moves.append(Move(span.forward, out, span.end - fetch, after))
        else:
            self._room += away.interval.size

    def _release(self, away: _Away) -> int:
        """The place of its second op: one later if a copy back that starts there would have to wait for it."""
        first = bisect_left(self._fetched, self._ends[away.release - 1] - self._rounding)
        waits = first < len(self._fetched) and self._fetched[first] < away.end_ms - self._rounding
        return away.release + waits

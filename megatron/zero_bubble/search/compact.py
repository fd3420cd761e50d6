"""Pull passes forward into gaps: rows become denser and still fit in memory.

Ranks run in time order. A rank whose next pass has not arrived may run a later one instead, if its memory still fits
until its old place; else it waits. Run on the mirrored problem the same step pushes work towards the end, where the
pipeline drains. Alternating both ("forward-backward improvement" in project scheduling: Tormos and Lova 2001) is the
search's strongest single step: the steady state of a good building block has no gaps and stays as it is, warm-up and
cool-down become as dense as memory allows.
"""

from __future__ import annotations

from heapq import heappop, heappush

from megatron.zero_bubble.search.problem import NONE, F, Problem, Rows, W, mirrored

_SLACK = 1e-9
_NEVER = float("inf")
_LOOK_AHEAD = 36
"""How many passes ahead of the next one are looked at: a few periods of a steady state."""


def compact(
    problem: Problem, rows: Rows, most_held: list[int] | None = None, haste: float = 0.0, backwards: bool = False
) -> Rows | None:
    """New rows; None when they deadlock or do not fit in memory.

    Args:
        problem: what the rows are for.
        rows: each rank's passes, first to last.
        most_held: for each stage, how many microbatches may wait for their B before a later F is not pulled forward
            any more (with ``backwards``, for their F before a later B).
        haste: by which part of its duration a pass that is pulled forward may delay the one whose turn it is.
        backwards: push to the end instead.
    """
    if not backwards:
        run = _Run(problem, rows, most_held, haste)
        return run.rows if run.finish() else None
    run = _MirroredRun(problem.mirrored, mirrored(rows), most_held, haste)
    return mirrored(run.rows) if run.finish() else None


class _Run:
    """The state of one run; the n-th of a code has arrived at ``arrivals[code][n]``, ``count[code]`` of it have run."""

    def __init__(self, problem: Problem, rows: Rows, most_held: list[int] | None, haste: float) -> None:
        self.problem = problem
        self.rows = [list(row) for row in rows]
        self.most_held = most_held or [problem.num_microbatches] * problem.num_stages
        self.late = 1.0 - haste
        codes = range(3 * problem.num_stages)
        self.count = [0 for _ in codes]
        self.arrivals = [self._given() if problem.tables.source[code] == NONE else [] for code in codes]
        self.kept = [0.0] * problem.num_ranks
        self.position = [0] * problem.num_ranks
        self.codes = [[c for c in codes if problem.tables.rank[c] == r] for r in range(problem.num_ranks)]
        self.delta = problem.tables.delta

    def finish(self) -> bool:
        """Run everything; whether all passes got through."""
        tables = self.problem.tables
        rank_of, duration, hop, successor = tables.rank, tables.duration, tables.hop, tables.successor
        count, arrivals, kept, position, rows = self.count, self.arrivals, self.kept, self.position, self.rows
        delta, limit = self.delta, self.problem.limit
        free = [0.0] * self.problem.num_ranks
        events = [(0.0, rank) for rank in range(self.problem.num_ranks)]
        while events:
            now, rank = heappop(events)
            if now < free[rank] or position[rank] == len(rows[rank]):
                continue
            head = rows[rank][position[rank]]
            soon = arrivals[head][count[head]] if count[head] < len(arrivals[head]) else _NEVER
            if delta[head] > 0 and kept[rank] + delta[head] > limit[rank]:
                soon = _NEVER
            code = head if soon <= now + _SLACK else self._overtake(rank, now, soon)
            if code == NONE:
                if soon < _NEVER:
                    heappush(events, (soon, rank))
                continue
            free[rank] = end = now + duration[code]
            heappush(events, (end, rank))
            kept[rank] += delta[code]
            count[code] += 1
            position[rank] += 1
            self._ended(code, end)
            fed = successor[code]
            if fed != NONE:
                arrival = end + hop[fed]
                self._arrived(code, fed, arrival)
                other = rank_of[fed]
                if other != rank and free[other] <= arrival:
                    heappush(events, (arrival, other))
        return all(at == len(row) for at, row in zip(position, rows, strict=True))

    def _ended(self, code: int, end: float) -> None:
        """A B lets its W start."""
        if (wgrad := self.problem.tables.wgrad[code]) != NONE:
            self.arrivals[wgrad].append(end)

    def _arrived(self, _code: int, fed: int, arrival: float) -> None:
        self.arrivals[fed].append(arrival)

    def _given(self) -> list[float]:
        """Arrivals of what is there from the start."""
        return [0.0] * self.problem.num_microbatches

    def _overtake(self, rank: int, now: float, soon: float) -> int:
        """The first later pass that may go before the next, due at ``soon``; it moves to the front of its row."""
        duration, count, arrivals = self.problem.tables.duration, self.count, self.arrivals
        ready = []
        for code in self.codes[rank]:
            n = count[code]
            on_time = n < len(arrivals[code]) and arrivals[code][n] <= now + _SLACK
            if not on_time or now + self.late * duration[code] > soon + _SLACK:
                continue
            if code % 3 != F or n - count[code + 1] < self.most_held[code // 3]:
                ready.append(code)
        delta, limit = self.delta, self.problem.limit[rank]
        row, at = self.rows[rank], self.position[rank]
        kept = peak = self.kept[rank]
        for place in range(at, min(at + _LOOK_AHEAD, len(row)) if ready else at):
            code = row[place]
            if place > at and code in ready:
                if delta[code] <= 0 or peak + delta[code] <= limit:
                    del row[place]
                    row.insert(at, code)
                    return code
                ready.remove(code)
            kept += delta[code]
            peak = max(peak, kept)
        return NONE


class _MirroredRun(_Run):
    """A run of a mirrored problem: W comes before its F and adds what it will have kept, F the rest, B frees all."""

    def __init__(self, problem: Problem, rows: Rows, most_held: list[int] | None, haste: float) -> None:
        super().__init__(problem, rows, most_held, haste)
        self.delta = []
        for whole, wgrad in zip(problem.tables.delta[F::3], problem.tables.delta[W::3], strict=True):
            self.delta += [whole + wgrad, -whole, -wgrad]
        self.arrivals = [self._given() if code % 3 == W else [] for code in range(len(self.count))]
        self.landed = [self._given() if before == NONE else [] for before in problem.tables.source[F::3]]

    def _ended(self, code: int, end: float) -> None:
        if code % 3 == W:
            self._gate(code - W, end)

    def _arrived(self, code: int, fed: int, arrival: float) -> None:
        if code % 3 == F and fed % 3 == F:
            self.landed[fed // 3].append(arrival)
            self._gate(fed, 0.0)
        else:
            self.arrivals[fed].append(arrival)

    def _gate(self, code: int, wgrad_end: float) -> None:
        """An F may start once its input has landed and its W has ended."""
        n, landed = len(self.arrivals[code]), self.landed[code // 3]
        if n < len(landed) and n < self.count[code + W]:
            self.arrivals[code].append(max(landed[n], wgrad_end))

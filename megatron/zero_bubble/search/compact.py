"""Pull passes forward into gaps: rows of F and B become denser and still fit in memory.

Ranks run in time order. A rank whose next pass has not arrived may run a later one instead, if that ends before the
next one arrives and its memory fits until its old place; else a W, else it waits. Run on the mirrored problem the same
step pushes work towards the end, where the pipeline drains. Alternating both ("forward-backward improvement" in project
scheduling: Tormos and Lova 2001) is the search's strongest single step.
"""

from __future__ import annotations

from heapq import heappop, heappush

from megatron.zero_bubble.search.problem import NONE, B, F, Problem, Rows

_SLACK = 1e-9
_LOOK_AHEAD = 24
"""How many passes ahead of the next one are looked at: about the length of a steady state's period."""


def compact(problem: Problem, rows: Rows, most_held: list[int] | None = None) -> Rows | None:
    """New rows; None when they deadlock or do not fit in memory.

    Args:
        problem: what the rows are for.
        rows: F and B of each rank, first to last.
        most_held: for each stage, how many microbatches may wait for their backward before a later F is not pulled
            forward any more.
    """
    run = _Run(problem, rows, most_held)
    return run.rows if run.finish() else None


class _Run:
    """The state of one run; the n-th of a code has arrived at ``arrivals[code][n]``, ``count[code]`` of it have run."""

    def __init__(self, problem: Problem, rows: Rows, most_held: list[int] | None) -> None:
        self.problem = problem
        self.rows = [list(row) for row in rows]
        self.most_held = most_held if most_held is not None else [problem.num_microbatches] * problem.num_stages
        codes = range(3 * problem.num_stages)
        self.count = [0 for _ in codes]
        self.arrivals: list[list[float]] = [[] for _ in codes]
        self.arrivals[F] = [0.0] * problem.num_microbatches
        self.kept = [0.0] * problem.num_ranks
        self.position = [0] * problem.num_ranks
        self.pending: list[list[int]] = [[] for _ in range(problem.num_ranks)]
        delta = problem.tables.delta
        stages_of = problem.placement.stages_of
        self.codes = [[3 * s + k for s in stages_of(r) for k in (F, B)] for r in range(problem.num_ranks)]
        # What a pass changes in the end, when its W has run as well.
        self.settled = [delta[c] + (delta[c + 1] if c % 3 == B else 0.0) for c in codes]

    def finish(self) -> bool:  # noqa: C901 (one hot loop over the events)
        """Run everything; whether all passes got through."""
        rank_of, duration, _, hop, _, delta = self.problem.tables
        count, arrivals, kept, position, pending = self.count, self.arrivals, self.kept, self.position, self.pending
        rows, limits = self.rows, self.problem.limit
        turn = 3 * (self.problem.num_stages - 1)
        free = [0.0] * self.problem.num_ranks
        events = [(0.0, rank) for rank in range(self.problem.num_ranks)]
        while events:
            now, rank = heappop(events)
            if now < free[rank]:
                continue
            row, at, waiting = rows[rank], position[rank], pending[rank]
            code, soon = NONE, float("inf")
            if at < len(row):
                head = row[at]
                if count[head] < len(arrivals[head]):
                    soon = arrivals[head][count[head]]
                if soon > now + _SLACK:
                    code = self._overtake(rank, now, soon)
                elif delta[head] <= 0 or kept[rank] + delta[head] <= limits[rank]:
                    code = head
                else:
                    soon = float("inf")  # until a W has freed memory
            if code == NONE and waiting and now + duration[waiting[0]] <= soon + _SLACK:
                code = waiting.pop(0)
            if code == NONE:
                if soon < float("inf"):
                    heappush(events, (soon, rank))
                continue
            free[rank] = end = now + duration[code]
            heappush(events, (end, rank))
            kept[rank] += delta[code]
            kind = code % 3
            if kind > B:
                continue
            count[code] += 1
            position[rank] += 1
            if kind == B:
                waiting.append(code + 1)
            follower = code - 3 if kind == B else code + 3 if code < turn else code + 1
            if follower >= 0:
                arrival = end + hop[follower]
                arrivals[follower].append(arrival)
                other = rank_of[follower]
                if other != rank and free[other] <= arrival:
                    heappush(events, (arrival, other))
        return all(at == len(row) for at, row in zip(position, rows, strict=True))

    def _overtake(self, rank: int, now: float, soon: float) -> int:
        """The first later pass that fits before ``soon``; it moves to the front of its row."""
        ready = self._ready(rank, now, soon)
        if not ready:
            return NONE
        delta, settled, limit = self.problem.tables.delta, self.settled, self.problem.limit[rank]
        row, at = self.rows[rank], self.position[rank]
        # Memory between the front and the pass's old place, if every W ran at once: the least there can be.
        freed = 0.0
        for code in self.pending[rank]:
            freed += delta[code]
        kept = self.kept[rank] + freed + settled[row[at]]
        peak = max(kept, self.kept[rank])
        for place in range(at + 1, min(at + 1 + _LOOK_AHEAD, len(row))):
            code = row[place]
            if code in ready:
                if code % 3 == B or peak + delta[code] <= limit:
                    del row[place]
                    row.insert(at, code)
                    return code
                ready.remove(code)
            kept += settled[code]
            if kept > peak:
                peak = kept
        return NONE

    def _ready(self, rank: int, now: float, soon: float) -> list[int]:
        """The codes that could start now and end before ``soon``."""
        duration, count, arrivals, most_held = self.problem.tables.duration, self.count, self.arrivals, self.most_held
        latest, deadline = now + _SLACK, soon + _SLACK
        ready = []
        for code in self.codes[rank]:
            n = count[code]
            on_time = n < len(arrivals[code]) and arrivals[code][n] <= latest and now + duration[code] <= deadline
            if on_time and (code % 3 == B or n - count[code + 1] < most_held[code // 3]):
                ready.append(code)
        return ready

"""Compact rows: pull passes forward into gaps, within the memory limit.

Ranks run in time order. If the input of a rank's next pass has not arrived, the rank may run a later pass instead,
provided that its memory fits up to the later pass's old place; otherwise it waits. Applied to the mirrored problem, the
same step pushes work towards the end, where the pipeline drains. Alternating both directions ("forward-backward
improvement" in project scheduling: Tormos and Lova 2001) is the most effective single step of the search: the steady
state of a good building block has no gaps and does not change, while warm-up and cool-down become as dense as memory
allows.

Where the first pass of a backward does not fit, but both of its passes together do, they run together: the backward is
fused. This needs all earlier backwards of the stage to be complete.
"""

from __future__ import annotations

from heapq import heappop, heappush

from megatron.zero_bubble.core.search.problem import NONE, B, F, Problem, Rows, W, mirrored

_SLACK = 1e-9
_NEVER = float("inf")
_LOOK_AHEAD, _OF_RANKS = 36, 32
"""Number of passes after the next one that are considered: a few periods of a steady state, on up to so many ranks.
With more ranks it grows in proportion, because a warm-up does: the pass that fills a wait stands behind all its F.
"""


def compact(
    problem: Problem, rows: Rows, most_held: list[int] | None = None, haste: float = 0.0, backwards: bool = False
) -> Rows | None:
    """Return the new rows, or None if they deadlock or do not fit in memory.

    Args:
        problem: the problem of the rows.
        rows: the passes of each rank, first to last.
        most_held: for each stage, the number of microbatches waiting for their B from which on no F is pulled forward
            (with ``backwards``: waiting for their F, and no B).
        haste: the share of its duration by which a pass that is pulled forward may delay the next pass.
        backwards: whether to push passes towards the end instead.
    """
    if not backwards:
        run = _Run(problem, rows, most_held, haste)
        return run.rows if run.finish() else None
    run = _MirroredRun(problem.mirrored, mirrored(rows), most_held, haste)
    return mirrored(run.rows) if run.finish() else None


class _Run:
    """The state of one run: the input of the n-th pass of a code arrives at ``arrivals[code][n]``, and ``count[code]``
    passes of the code have run. ``opens`` is the kind of the first pass of a fused backward, and ``closes`` is added to
    its code for the second.
    """

    opens, closes = B, W - B

    def __init__(self, problem: Problem, rows: Rows, most_held: list[int] | None, haste: float) -> None:
        self.problem = problem
        self.rows = [list(row) for row in rows]
        self.most_held = most_held or [problem.num_microbatches] * problem.num_stages
        self.late = 1.0 - haste
        self.look_ahead = _LOOK_AHEAD * max(_OF_RANKS, problem.num_ranks) // _OF_RANKS
        codes = range(3 * problem.num_stages)
        self.count = [0 for _ in codes]
        self.arrivals = [self._given() if problem.tables.source[code] == NONE else [] for code in codes]
        self.kept = [0.0] * problem.num_ranks
        self.position = [0] * problem.num_ranks
        self.codes = [[c for c in codes if problem.tables.rank[c] == r] for r in range(problem.num_ranks)]
        self.delta = problem.tables.delta
        self.may_fuse = [change > 0 for change in problem.tables.delta[B::3]]

    def finish(self) -> bool:
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
                soon = self._fused_at(head, kept[rank])
            code = head if soon <= now + _SLACK else self._overtake(rank, now, soon)
            if code == NONE:
                if soon < _NEVER:
                    heappush(events, (soon, rank))
                continue
            end, sender = now + duration[code], code
            is_fused = delta[code] > 0 and kept[rank] + delta[code] > limit[rank]
            kept[rank] += delta[code]
            count[code] += 1
            position[rank] += 1
            if is_fused:
                second = code + self.closes
                self._pull(rank, second, position[rank])
                end += duration[second]
                sender = code if second % 3 == W else second
                kept[rank] += delta[second]
                count[second] += 1
                position[rank] += 1
            free[rank] = end
            heappush(events, (end, rank))
            self._ended(code, end)
            fed = successor[sender]
            if fed != NONE:
                arrival = end + hop[fed]
                self._arrived(sender, fed, arrival)
                other = rank_of[fed]
                if other != rank and free[other] <= arrival:
                    heappush(events, (arrival, other))
        return all(at == len(row) for at, row in zip(position, rows, strict=True))

    def _ended(self, code: int, end: float) -> None:
        """Release the W of a B."""
        if (wgrad := self.problem.tables.wgrad[code]) != NONE:
            self.arrivals[wgrad].append(end)

    def _arrived(self, _code: int, fed: int, arrival: float) -> None:
        self.arrivals[fed].append(arrival)

    def _fused_at(self, code: int, kept: float) -> float:
        """Return when the input of a fused backward arrives that ``code`` is the first pass of; never if it is not one,
        or does not fit next to ``kept``.
        """
        second = code + self.closes
        if not self._opens(code) or self.count[second] != self.count[code]:
            return _NEVER
        inputs, n = self._inputs(code), self.count[code]
        fits = kept + (self.delta[code] + self.delta[second]) <= self.problem.limit[self.problem.tables.rank[code]]
        return inputs[n] if fits and n < len(inputs) else _NEVER

    def _opens(self, code: int) -> bool:
        """Whether the first pass of a fused backward may be ``code``."""
        return code % 3 == self.opens and self.may_fuse[code // 3]

    def _inputs(self, code: int) -> list[float]:
        return self.arrivals[code]

    def _pull(self, rank: int, code: int, to: int) -> None:
        """Move the next pass of ``code`` to the place ``to``."""
        row = self.rows[rank]
        del row[row.index(code, to)]
        row.insert(to, code)

    def _given(self) -> list[float]:
        """Arrivals of inputs that are available from the start."""
        return [0.0] * self.problem.num_microbatches

    def _overtake(self, rank: int, now: float, soon: float) -> int:
        """Return the first later pass that may run before the next one, whose input arrives at ``soon``, and move it to
        the front of its row, a backward that fits only if it is fused with both of its passes; NONE if there is no such
        pass.
        """
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
        for place in range(at, min(at + self.look_ahead, len(row)) if ready else at):
            code = row[place]
            if place > at and code in ready:
                is_fused = delta[code] > 0 and peak + delta[code] > limit
                if not is_fused or self._fuses(code, peak, now, soon):
                    self._pull(rank, code, at)
                    if is_fused:
                        self._pull(rank, code + self.closes, at + 1)
                    return code
                ready.remove(code)
            kept += delta[code]
            # What a fused backward holds within is not counted.
            if kept <= limit or not self._opens(code) or row[place + 1 : place + 2] != [code + self.closes]:
                peak = max(peak, kept)
        return NONE

    def _fuses(self, code: int, peak: float, now: float, soon: float) -> bool:
        """Whether a fused backward that ``code`` is the first pass of may run now, next to ``peak``."""
        if self._fused_at(code, peak) > now + _SLACK:
            return False
        duration = self.problem.tables.duration
        return now + self.late * (duration[code] + duration[code + self.closes]) <= soon + _SLACK


class _MirroredRun(_Run):
    """A run of a mirrored problem: W precedes its F and adds the memory that it frees in the original problem, F adds
    the rest, and B frees all. A fused backward is a W directly followed by its F.
    """

    opens, closes = W, F - W

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

    def _inputs(self, code: int) -> list[float]:
        return self.landed[code // 3]

    def _gate(self, code: int, wgrad_end: float) -> None:
        """Release an F when its input has arrived and its W has ended."""
        n, landed = len(self.arrivals[code]), self.landed[code // 3]
        if n < len(landed) and n < self.count[code + W]:
            self.arrivals[code].append(max(landed[n], wgrad_end))

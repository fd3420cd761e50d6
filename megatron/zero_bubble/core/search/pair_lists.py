"""Orders of pairs by lists: a rank that is free runs the most urgent F together with the most urgent backward.

Passes are placed in the order of time, each when its inputs are there, so no order deadlocks. With only one of the two,
a rank runs it alone, unless the other comes within a share of the time of a forward; with neither, it runs a W. How
many forwards a rank may have in flight, how long it waits, and where backwards are split is the ``Habit`` of an order.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from megatron.zero_bubble.core.ir import Pass
from megatron.zero_bubble.core.ir.passes import BW, B, F, W
from megatron.zero_bubble.core.search.pair_tables import PairTables, Row, Works, at

_NOW = 1e-9
"""What comes within so many ms is there."""


class Habit(NamedTuple):
    """How ranks choose.

    Attributes:
        ahead: forwards that the first rank may have in flight; None for any number.
        less: by how many fewer each next rank may.
        unit: the microbatches that run through one chunk before the next one; None for all.
        deep: whether the last chunk with a forward is the most urgent one of a unit, instead of the first.
        patience: for how long, in forwards, a rank with only a forward waits for a backward, and the reverse.
        eager: the part of a W for which a rank without anything else must have time.
        pairs_fused, others_fused: whether backwards in pairs, and alone, are one BW, instead of B and W.
    """

    ahead: int | None
    less: int
    unit: int | None
    deep: bool
    patience: tuple[float, float]
    eager: float
    pairs_fused: bool
    others_fused: bool


def listed(tables: PairTables, habit: Habit, limit: float) -> list[Row] | None:
    """Return the rows of a habit; None if they cannot end within a memory limit, in the unit of the figures."""
    return _Lists(tables, habit, limit).run()


class _Lists:
    """One run over all passes, in order of time."""

    def __init__(self, tables: PairTables, habit: Habit, limit: float) -> None:
        self._tables, self._habit, self._limit = tables, habit, limit
        on, m = tables.placement, tables.num_microbatches
        ranks, self._last = range(on.num_ranks), on.num_stages - 1
        self._rank_of = on.stage_to_rank
        self._rows: list[Row] = [[] for _ in ranks]
        self._lanes = [(0.0, 0.0, 0.0)] * len(ranks)
        self._forwards: list[dict[tuple[int, int], float]] = [{} for _ in ranks]  # by stage and microbatch, when ready
        self._backwards: list[dict[tuple[int, int], float]] = [{} for _ in ranks]
        self._weights: list[deque[Works]] = [deque() for _ in ranks]
        self._flying, self._kept = [0] * len(ranks), [0.0] * len(ranks)
        self._forwards[self._rank_of[0]] = {(0, microbatch): 0.0 for microbatch in range(m)}
        self._events = [(0.0, rank) for rank in ranks]
        self._next = [0.0] * len(ranks)  # when each rank chooses next
        self._forward_ms = max(tables.costs.forward_ms)
        chunks = on.num_stages // on.num_ranks
        ahead = m * on.num_stages if habit.ahead is None else habit.ahead
        self._most = [max(chunks, ahead - habit.less * rank) for rank in ranks]

    def run(self) -> list[Row] | None:
        heapify(self._events)
        while self._events:
            now, rank = heappop(self._events)
            if now == self._next[rank]:  # else it has been asked to choose earlier
                self._next[rank] = math.inf
                self._choose(rank, now)
        if any((*self._forwards, *self._backwards)):
            return None
        for row, weights in zip(self._rows, self._weights, strict=True):
            row.extend(map(self._tables.step, weights))
        return self._rows

    def _choose(self, rank: int, now: float) -> None:
        habit, soon = self._habit, now + _NOW
        forward, backward = self._most_urgent(rank, soon)
        next_forward, next_backward = self._coming(rank, soon)
        if forward is None and backward is None:
            self._fill(rank, now, min(next_forward, next_backward))
        elif forward is None or backward is None:
            patience, coming = habit.patience[forward is None], next_backward if backward is None else next_forward
            if coming - now <= patience * self._forward_ms:
                self._fill(rank, now, coming)
            elif forward is not None:
                self._place(rank, now, (Pass(forward[0], F, forward[1]),))
            elif backward is not None:
                self._place(rank, now, (self._backward(rank, backward, habit.others_fused),))
        else:
            with_it = self._backward(rank, backward, habit.pairs_fused)
            self._place(rank, now, (Pass(forward[0], F, forward[1]), with_it))

    def _backward(self, rank: int, place: tuple[int, int], fused: bool) -> Pass:
        """A backward, fused if it should be and no earlier W of its stage waits."""
        stage, microbatch = place
        waits = any(works[0].stage == stage for works in self._weights[rank])
        return Pass(stage, BW if fused and not waits else B, microbatch)

    def _most_urgent(self, rank: int, soon: float) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """The F and the backward to run, as stage and microbatch."""
        unit, sign = self._habit.unit or self._tables.num_microbatches, -1 if self._habit.deep else 1
        forward = backward = None
        if self._flying[rank] < self._most[rank]:
            activation, room = self._tables.memory.activation, self._limit - self._kept[rank]
            least: tuple[int, ...] = ()
            for each, ready in self._forwards[rank].items():
                if ready <= soon and activation[each[0]] <= room:
                    key = each[1] // unit, sign * each[0], each[1]
                    if forward is None or key < least:
                        forward, least = each, key
        least = ()
        for each, ready in self._backwards[rank].items():
            if ready <= soon:
                key = each[1] // unit, -each[0], each[1]
                if backward is None or key < least:
                    backward, least = each, key
        return forward, backward

    def _coming(self, rank: int, soon: float) -> tuple[float, float]:
        """When the next F and the next backward are there that are not yet."""
        full = self._flying[rank] >= self._most[rank]
        forwards = () if full else self._forwards[rank].values()
        return tuple(  # type: ignore[return-value]
            min((ready for ready in times if ready > soon), default=math.inf)
            for times in (forwards, self._backwards[rank].values())
        )

    def _fill(self, rank: int, now: float, until: float) -> None:
        """Run a W if there is time for it, else wait."""
        if weights := self._weights[rank]:
            works = weights[0]
            if until - now >= self._habit.eager * self._tables.step(works).computed[0]:
                weights.popleft()
                self._place(rank, now, works)
                return
        self._wake(rank, until)

    def _place(self, rank: int, now: float, works: Works) -> None:
        step = self._tables.step(works)
        computed, sent, issued = self._lanes[rank]
        ready = max([issued, *(self._ready(rank, p) for p in works)])
        ends = [at(end, computed, sent, ready) for end in step.ends]
        free = at(step.computed, computed, sent, ready)
        self._lanes[rank] = free, at(step.sent, computed, sent, ready), ready
        self._rows[rank].append(step)
        self._kept[rank] += sum(step.changes)
        for p, end in zip(works, ends, strict=True):
            self._hand_on(rank, p, end)
        self._wake(rank, now)

    def _ready(self, rank: int, p: Pass) -> float:
        """When the input of a pass is there, which is no longer one that may run."""
        if p.kind is W:
            return 0.0
        return (self._forwards if p.kind is F else self._backwards)[rank].pop((p.stage, p.microbatch))

    def _hand_on(self, rank: int, p: Pass, end: float) -> None:
        """Give the output of a pass to the rank that waits for it."""
        stage, kind, microbatch, _ = p
        if kind is W:
            return
        if kind is F:
            self._flying[rank] += 1
            if stage == self._last:
                self._backwards[rank][stage, microbatch] = end
                self._wake(rank, end)
            else:
                self._send(self._forwards, stage + 1, microbatch, end + self._tables.hops[0][stage + 1])
            return
        self._flying[rank] -= 1
        if kind is B:
            self._weights[rank].append((Pass(stage, W, microbatch),))
        if stage:
            self._send(self._backwards, stage - 1, microbatch, end + self._tables.hops[1][stage - 1])

    def _send(self, to: list[dict[tuple[int, int], float]], stage: int, microbatch: int, there: float) -> None:
        rank = self._rank_of[stage]
        to[rank][stage, microbatch] = there
        self._wake(rank, there)

    def _wake(self, rank: int, at_ms: float) -> None:
        """Let a rank choose at this time, or once it is free."""
        choice = max(at_ms, self._lanes[rank][0])
        if choice < self._next[rank]:
            self._next[rank] = choice
            heappush(self._events, (choice, rank))

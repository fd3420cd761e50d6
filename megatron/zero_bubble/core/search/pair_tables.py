"""What a search for pairs needs of an op: when its lanes are free after it, and when its passes end.

An op with parts on two lanes maps three times, when either lane is free and when its inputs are there, to four: when
either lane is free again, and when either of its passes ends. Each is the latest of the three plus a constant, so an op
is a table of twelve numbers, however many layers it has, and rows are timed about ten times as fast as by ``simulate``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.messages import occupied
from megatron.zero_bubble.core.ir import Pass, Placement, Schedule
from megatron.zero_bubble.core.ir.ops import COMPUTE
from megatron.zero_bubble.core.ir.passes import B, F, W, groups

Works = tuple[Pass, ...]
"""The passes of an op: one, or the F and the backward of a pair."""
_Latest = tuple[float, float, float]
"""What is added to each of three times, of which the latest counts."""
_NEVER = -math.inf
_COMPUTING: _Latest = (0.0, _NEVER, _NEVER)
_SENDING: _Latest = (_NEVER, 0.0, _NEVER)
_READY: _Latest = (_NEVER, _NEVER, 0.0)


class Step(NamedTuple):
    """An op, as the loops use it.

    Attributes:
        computed, sent, ends: when the computing lane and the other one are free after it, and when each of its passes
            ends, from the times at which both are free and it is ready.
        needs: the places of its inputs, and how long they travel.
        makes: the places of the outputs of its passes.
        changes: of the memory of its rank, one after the other.
    """

    works: Works
    computed: _Latest
    sent: _Latest
    ends: tuple[_Latest, ...]
    needs: tuple[tuple[int, float], ...]
    makes: tuple[int, ...]
    changes: tuple[float, ...]


Row = list[Step]


def _later(one: _Latest, other: _Latest, ms: float = 0.0) -> _Latest:
    return max(one[0], other[0]) + ms, max(one[1], other[1]) + ms, max(one[2], other[2]) + ms


@dataclass(frozen=True)
class PairTables:
    """The figures of a search on one placement, as its loops use them."""

    costs: PassCosts
    memory: PassMemory
    placement: Placement
    num_microbatches: int
    hops: tuple[tuple[float, ...], tuple[float, ...]]
    _times: dict[tuple[object, ...], tuple[_Latest, _Latest, tuple[_Latest, ...]]] = field(default_factory=dict)
    _steps: dict[Works, Step] = field(default_factory=dict)

    @classmethod
    def of(cls, costs: PassCosts, memory: PassMemory, placement: Placement, num_microbatches: int) -> PairTables:
        own = occupied(costs.overlapping(True), placement)
        return cls(own, memory, placement, num_microbatches, costs.hops(placement))

    @property
    def num_places(self) -> int:
        """The outputs of all passes: of forwards, of backwards and, for their order only, of weight gradients."""
        return 3 * self.placement.num_stages * self.num_microbatches

    def step(self, works: Works) -> Step:
        if (known := self._steps.get(works)) is None:
            known = self._steps[works] = self._made(works)
        return known

    def rows(self, schedule: Schedule) -> list[Row]:
        return [[self.step(works) for works in groups(row, schedule.pairs)] for row in schedule.order]

    def schedule(self, name: str, rows: Iterable[Iterable[Step]]) -> Schedule:
        of = [[step.works for step in row] for row in rows]
        order = tuple(tuple(p for works in row for p in works) for row in of)
        pairs = frozenset(works[0] for row in of for works in row if len(works) > 1)
        return Schedule(name, self.placement, self.num_microbatches, order, pairs=pairs, overlap_experts=not pairs)

    def _made(self, works: Works) -> Step:
        needs = tuple(each for p in works for each in self._needs(p))
        changes = tuple(change for p in works for change in self.memory.changes(p) if change)
        return Step(works, *self._timed(works), needs, tuple(map(self._place, works)), changes)

    def _place(self, p: Pass) -> int:
        stages = self.placement.num_stages
        block = 0 if p.kind is F else 2 if p.kind is W else 1
        return (block * stages + p.stage) * self.num_microbatches + p.microbatch

    def _needs(self, p: Pass) -> list[tuple[int, float]]:
        stage, kind, microbatch, _ = p
        if kind is F:
            return [(self._place(Pass(stage - 1, F, microbatch)), self.hops[0][stage])] if stage else []
        if kind is W:
            return [(self._place(Pass(stage, B, microbatch)), 0.0)]
        needed = [(self._place(Pass(stage, F, microbatch)), 0.0)]
        if stage + 1 < self.placement.num_stages:
            needed.append((self._place(Pass(stage + 1, B, microbatch)), self.hops[1][stage]))
        return needed

    def _timed(self, works: Works) -> tuple[_Latest, _Latest, tuple[_Latest, ...]]:
        """The times of an op, which are those of all microbatches."""
        key = tuple([each for p in works for each in p[:2]])
        if (known := self._times.get(key)) is None:
            known = self._times[key] = self._latest(works)
        return known

    def _latest(self, works: Works) -> tuple[_Latest, _Latest, tuple[_Latest, ...]]:
        computed, sent, ends = _COMPUTING, _SENDING, [_READY] * len(works)
        parts = self.costs.parts(works)
        for lane, ms, work in parts:
            issued = _READY if work is None else ends[work]
            if lane == COMPUTE:
                end = computed = _later(computed, issued, ms)
            else:
                end = sent = _later(sent, issued, ms)
            if work is not None:
                ends[work] = end
        if not parts:
            ms = self.costs.duration(works[0]) if len(works) == 1 else self.costs.pair(works[0], works[1])
            computed = _later(computed, _READY, ms)
            ends = [computed] * len(works)
        return computed, sent, tuple(ends)


def at(times: _Latest, computed: float, sent: float, ready: float) -> float:
    """The latest of the three."""
    latest, other, third = times[0] + computed, times[1] + sent, times[2] + ready
    if other > latest:
        latest = other
    return third if third > latest else latest


def peak(row: Iterable[Step]) -> float:
    """The most memory of a rank, by the order of its passes."""
    now = most = 0.0
    for step in row:
        for change in step.changes:
            now += change
            if now > most:
                most = now
    return most


def length_of(tables: PairTables, rows: Sequence[Sequence[Step]], objective: Metric) -> float:
    """The length of an order in ms, as ``simulate`` finds it; infinity if its ranks wait for each other."""
    made: list[float | None] = [None] * tables.num_places
    waiting: dict[int, int] = {}
    states = [(0.0, 0.0, 0.0, -1.0)] * len(rows)
    left = [iter(row) for row in rows]
    nexts = [next(row, None) for row in left]
    todo = list(range(len(rows)))
    while todo:
        rank = todo.pop()
        row, step = left[rank], nexts[rank]
        computed, sent, issued, begun = states[rank]
        while step is not None:
            _, of_computed, of_sent, ends, needs, makes, _ = step
            for place, hop in needs:
                if (there := made[place]) is None:
                    waiting[place] = rank
                    break
                if there + hop > issued:
                    issued = there + hop
            else:
                if begun < 0:
                    begun = issued
                for place, end in zip(makes, ends):  # noqa: B905
                    made[place] = at(end, computed, sent, issued)
                    if place in waiting:
                        todo.append(waiting.pop(place))
                computed, sent = at(of_computed, computed, sent, issued), at(of_sent, computed, sent, issued)
                step = next(row, None)
                continue
            break
        nexts[rank], states[rank] = step, (computed, sent, issued, begun)
    if any(step is not None for step in nexts):
        return math.inf
    since = (lambda begun: 0.0) if objective == "makespan" else (lambda begun: begun)
    return max(max(computed, sent) - since(begun) for computed, sent, _, begun in states)

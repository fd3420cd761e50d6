"""Bounds by longest paths: the least time before and after each pass, and a one-machine problem per rank.

In every schedule of a ``Setting``, the passes obey the dependencies of the flow, the order of microbatches, and an
order that the memory limit enforces: if at most K microbatches fit, F(j) comes after B(j-K). Longest paths along these
edges give every pass a head and a tail. In small pipelines, so do the passes of the same rank that always come before
or after it. The passes of any one rank, with their heads and tails, are a one-machine problem (``jackson``), whose
solution is a lower bound.

The flow may be any in which every pass takes inputs of its own microbatch: the k-th pass of a kind on a stage can be
relabelled as that of microbatch k. All edges lead from earlier to later microbatches or along the path of one
microbatch, so passes numbered by microbatch, then in the order in which one microbatch runs them, are in topological
order. The first of them on a rank is the one with which its span starts: with a divided vocabulary, every other pass
of the rank needs the first F of the pipeline, which takes the sum of all I.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from megatron.zero_bubble.core.analysis.bounds.jackson import Task, one_machine_bound
from megatron.zero_bubble.core.analysis.bounds.room import time_to_make_room
from megatron.zero_bubble.core.analysis.bounds.setting import Setting
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.ir import Compute, Flow, Kind, Pass
from megatron.zero_bubble.core.ir.flow import microbatch
from megatron.zero_bubble.core.ir.passes import B, F, W

_NEVER = -math.inf
_ROUNDS = 4
"""Number of earlier microbatches from which the time to make room for an F is counted; more are rarely longer."""


class Paths:
    """The graph of the passes of a setting.

    Args:
        costs: has the times of transfers, and of passes other than F, B and W.
        reach: the number of microbatches before and after a pass whose passes compete with it for its rank.

    Attributes:
        size: the number of passes.
        length: the time of every pass.
    """

    def __init__(self, setting: Setting, costs: PassCosts, flow: Flow, reach: int = 0) -> None:
        self.setting, self.reach, self._costs, self._flow = setting, reach, costs, flow
        self._order = microbatch(flow)
        self._step = len(self._order)
        self._number = {p: n for n, p in enumerate(self._order)}
        self._rank_of = [setting.placement.stage_to_rank[p.stage] for p in self._order]
        self.length = [self._duration(p) for p in self._order] * setting.m
        self.size = len(self.length)

    def number(self, p: Pass) -> int:
        return p.microbatch * self._step + self._number[p._replace(microbatch=0)]

    def bound(self, rank: int | None) -> float:
        """Return a bound on the span of ``rank``, or on the makespan (None): the largest bound over all machines."""
        heads, tails = self.around(rank)
        return max(one_machine_bound(self._jobs(machine, heads, tails)) for machine in range(self.setting.num_ranks))

    def around(self, rank: int | None) -> tuple[list[float], list[float]]:
        """Return the least time before each pass, from the first one of ``rank`` or of all ranks (None), and the least
        time after it, to the last one; -inf without a path.
        """
        own = [n for n, of in enumerate(self._rank_of) if rank is None or of == rank]
        return self._heads(own[0]), self._tails([self.size - self._step + n for n in own])

    def _duration(self, p: Pass) -> float:
        own = {F: self.setting.f, B: self.setting.b, W: self.setting.w}
        return own[p.kind][p.stage] if p.kind in own else self._costs.duration(p)

    @cached_property
    def before(self) -> Sequence[Sequence[tuple[int, float]]]:
        """For every pass, the passes that must end before it starts, and the least times between them."""
        return [
            [(first + offset, ms) for offset, ms in edges if first + offset >= 0]
            for first in range(0, self.size, self._step)
            for edges in self._before
        ]

    @cached_property
    def _before(self) -> Sequence[Sequence[tuple[int, float]]]:
        """For every pass of a microbatch, the passes that must end before it starts: their number, relative to the
        first pass of its microbatch, and the least time from their end to its start.
        """
        edges = []
        for n, p in enumerate(self._order):
            sources = dict.fromkeys(self._number[value.producer] for value in self._flow.inputs(p))
            before = [(n - self._step, 0.0)]
            for source in sources:
                ms = self._hop_ms(p, self._order[source])
                if ms or not any(self._earlier[other] >> source & 1 for other in sources):  # else it is shorter
                    before.append((source, ms))
            if p.kind is F:
                forced = forced_by_memory(self.setting, p.stage)
                before += [(self._number[Pass(k, kind, 0)] - lag * self._step, ms) for kind, k, lag, ms in forced]
            edges.append(before)
        return edges

    def _hop_ms(self, p: Pass, producer: Pass) -> float:
        source, rank = (self.setting.placement.stage_to_rank[of.stage] for of in (producer, p))
        if source == rank:
            return 0.0
        return self._costs.comm(source, rank) + Compute(p).arrival_ms(self._costs, producer)

    @cached_property
    def _earlier(self) -> list[int]:
        """For every pass of a microbatch, the set of passes that it depends on, as bits of a number."""
        earlier: list[int] = []
        for p in self._order:
            producers = {self._number[value.producer] for value in self._flow.inputs(p)}
            earlier.append(sum(1 << n for n in producers))
            for n in producers:
                earlier[-1] |= earlier[n]
        return earlier

    def _heads(self, origin: int) -> list[float]:
        """Return the least time from the start of pass ``origin`` to the start of each pass; -inf without a path."""
        heads, ends = [_NEVER] * self.size, [_NEVER] * self.size
        heads[origin] = 0.0
        for first in range(0, self.size, self._step):
            for n, edges in enumerate(self._before, first):
                head = heads[n]
                for offset, transfer in edges:
                    if first + offset >= 0 and ends[first + offset] + transfer > head:
                        head = ends[first + offset] + transfer
                if head > _NEVER:
                    heads[n] = head
                    if self.reach:
                        heads[n] = max(head, self._busy(n, heads, self._near_before))
                    ends[n] = heads[n] + self.length[n]
        return heads

    def _tails(self, ends: Sequence[int]) -> list[float]:
        """Return the least time from the end of each pass to the end of any pass in ``ends``; -inf without a path."""
        tails, length, before = [_NEVER] * self.size, self.length, self._before
        for n in ends:
            tails[n] = 0.0
        for first in range(self.size - self._step, -1, -self._step):
            for n in range(first + self._step - 1, first - 1, -1):
                if tails[n] == _NEVER:
                    continue
                if self.reach:
                    tails[n] = max(tails[n], self._busy(n, tails, self._near_after))
                time = tails[n] + length[n]
                for offset, transfer in before[n - first]:
                    if first + offset >= 0 and time + transfer > tails[first + offset]:
                        tails[first + offset] = time + transfer
        return tails

    @cached_property
    def _same_before(self) -> list[list[int]]:
        """For every pass of a microbatch, itself and the passes of that microbatch and rank that always precede it."""
        ranks = self._rank_of
        return [
            [*(k for k in range(n) if ranks[k] == ranks[n] and earlier >> k & 1), n]
            for n, earlier in enumerate(self._earlier)
        ]

    @cached_property
    def _same_after(self) -> list[list[int]]:
        """For every pass of a microbatch, itself and the passes of that microbatch and rank that always follow it."""
        return [[n for n, before in enumerate(self._same_before) if k in before] for k in range(self._step)]

    @cached_property
    def _near_before(self) -> list[list[int]]:
        """By how much the numbers of the passes before it that compete with a pass differ from its own."""
        return self._near(self._same_before, range(-self.reach, 1))

    @cached_property
    def _near_after(self) -> list[list[int]]:
        """The same of those after it."""
        return self._near(self._same_after, range(self.reach + 1))

    def _near(self, same: Sequence[Sequence[int]], lags: range) -> list[list[int]]:
        """For the passes ``same`` of the microbatches at ``lags``. Microbatches keep their order."""
        return [
            [k - n + lag * self._step for lag in lags for k in others if lag or k != n] for n, others in enumerate(same)
        ]

    def _busy(self, n: int, times: Sequence[float], near: Sequence[Sequence[int]]) -> float:
        """Return the least time in which the rank of pass ``n`` can run the passes that are ``near`` it, none of them
        before its entry in ``times``.
        """
        end = 0.0
        others = [n + by for by in near[n % self._step] if 0 <= n + by < self.size]
        for time, k in sorted([(times[k], k) for k in others]):
            if time > _NEVER:
                end = max(end, time) + self.length[k]
        return end

    def _jobs(self, machine: int, heads: Sequence[float], tails: Sequence[float]) -> Iterator[Task]:
        for own, rank in enumerate(self._rank_of):
            if rank == machine:
                for n in range(own, self.size, self._step):
                    if heads[n] > _NEVER and tails[n] > _NEVER:
                        yield heads[n], self.length[n], tails[n]


def forced_by_memory(s: Setting, stage: int) -> Iterator[tuple[Kind, int, int, float]]:
    """Yield the passes that F on ``stage`` must follow: their kind, their stage, by how many microbatches they are
    earlier, and the least time from their end to the start of F.

    Assume that F(j) starts before B(i) of this chunk or a later one has ended. Until that B ends, microbatch i
    occupies the memory of F on all chunks up to that of the B, and microbatches i+1 to j at least that of F up to
    this chunk. If this exceeds the limit, F(j) comes after B(i). Assume that F(j) starts before W(i) of this chunk
    or an earlier one has ended. Then microbatches i to j-1 occupy at least the memory of W, and j that of its F.
    """
    rank = s.placement.stage_to_rank[stage]
    chunks, limit = s.stages(rank), s.limit[rank]
    upper = sum(s.a[k] for k in chunks if k <= stage)
    between = 0.0
    lags = {}
    for k in chunks:
        if k >= stage:
            between += s.a[k] if k > stage else 0.0
            lags[k] = max(1, s.fits(upper, limit - between))
            yield B, k, lags[k], 0.0
        if k <= stage and s.g[k] > 0:
            lag = s.fits(s.g[k], limit - upper) + 1
            yield W, k, lag, 0.0
    last = chunks[-1]
    for lag in range(lags[last], min(lags[last] + _ROUNDS, s.m)):
        # Passes of later chunks that F on this stage is known to follow.
        counts = [lag + 1 if k <= stage else max(0, lag - lags[k] + 1) for k in chunks]
        yield B, last, lag, max(0.0, time_to_make_room(s, rank, counts) - s.b[last])

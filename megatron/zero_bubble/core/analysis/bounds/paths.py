"""Bounds by longest paths: the least time before and after each pass, and a one-machine problem per rank.

In every schedule of a ``Setting``, the passes obey the dependencies of the pipeline, the order of microbatches, and an
order that the memory limit enforces: if at most K microbatches fit, F(j) comes after B(j-K). Longest paths along these
edges give every pass a head and a tail. In small pipelines, so do the passes of the same rank that always come before
or after it. The passes of any one rank, with their heads and tails, are a one-machine problem (``jackson``), whose
solution is a lower bound.

All edges lead from earlier to later microbatches or along the path of one microbatch. Passes numbered by microbatch,
then F by rising stage, B by falling stage, and W, are therefore in topological order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from megatron.zero_bubble.core.analysis.bounds.jackson import one_machine_bound
from megatron.zero_bubble.core.analysis.bounds.room import time_to_make_room
from megatron.zero_bubble.core.analysis.bounds.setting import Setting
from megatron.zero_bubble.core.ir import Chain, Kind, Pass

_NEVER = -math.inf
_ROUNDS = 4
"""Number of earlier microbatches from which the time to make room for an F is counted; more are rarely longer."""


class Paths:
    """The graph of the passes of a setting, numbered in the order in which a single microbatch would run them."""

    def __init__(self, setting: Setting, reach: int = 0) -> None:
        """``reach`` is the number of microbatches before and after a pass whose passes compete with it for its rank."""
        self.setting = setting
        self.reach = reach
        self.stages = setting.num_stages
        self.length = (*setting.f, *reversed(setting.b), *setting.w) * setting.m

    def f(self, stage: int, microbatch: int) -> int:
        """Return the number of F of ``stage``."""
        return microbatch * 3 * self.stages + stage

    def b(self, stage: int, microbatch: int) -> int:
        """Return the number of B of ``stage``."""
        return (microbatch * 3 + 2) * self.stages - 1 - stage

    def w(self, stage: int, microbatch: int) -> int:
        """Return the number of W of ``stage``."""
        return (microbatch * 3 + 2) * self.stages + stage

    @cached_property
    def before(self) -> Sequence[Sequence[tuple[int, float]]]:
        """For every pass, the passes that must end before it starts, and the transfer times between them."""
        s, step = self.setting, 3 * self.stages
        number = {Kind.B: self.b, Kind.W: self.w}
        turns = [
            [(number[kind](k, -lag), lag, ms) for kind, k, lag, ms in forced_by_memory(s, stage)]
            for stage in range(self.stages)
        ]
        by_kind = [list(self._fed_by(kind)) for kind in (Kind.F, Kind.B, Kind.W)]
        edges: list[list[tuple[int, float]]] = []
        for j in range(s.m):
            of_j = ([[(n + j * step, ms) for n, ms in needs] for needs in stages] for stages in by_kind)
            forwards, backwards, wgrads = of_j
            for k, needs in enumerate(forwards):
                edges.append(needs + [(first + j * step, ms) for first, since, ms in turns[k] if j >= since])
            edges += reversed(backwards)
            edges += wgrads
            if j:
                for n in range(j * step, (j + 1) * step):
                    edges[n].append((n - step, 0.0))
        return edges

    def _fed_by(self, kind: Kind) -> Iterator[list[tuple[int, float]]]:
        """Yield, for every stage, the pass that determines when the pass of ``kind`` for microbatch 0 can start, with
        the transfer time between them.
        """
        s, chain = self.setting, Chain(self.stages)
        number = {Kind.F: self.f, Kind.B: self.b, Kind.W: self.w}
        for stage in range(self.stages):
            source = chain.source(Pass(stage, kind, 0))
            if source is None:
                yield []
                continue
            hop = 0.0
            if source.stage != stage:
                hop = s.activation_hop[stage - 1] if kind is Kind.F else s.gradient_hop[stage]
            yield [(number[source.kind](source.stage, 0), hop)]

    def heads(self, origin: int) -> list[float]:
        """Return the least time from the start of pass ``origin`` to the start of each pass; -inf without a path."""
        heads = [_NEVER] * len(self.length)
        heads[origin] = 0.0
        length = self.length
        for n in range(origin + 1, len(heads)):
            for before, transfer in self.before[n]:
                time = heads[before] + length[before] + transfer
                if time > heads[n]:
                    heads[n] = time
            if heads[n] > _NEVER and self.reach:
                heads[n] = max(heads[n], self._busy(n, heads, self._earlier, range(-self.reach, 1)))
        return heads

    def tails(self, ends: Iterable[int]) -> list[float]:
        """Return the least time from the end of each pass to the end of any pass in ``ends``; -inf without a path."""
        tails = [_NEVER] * len(self.length)
        for n in ends:
            tails[n] = 0.0
        length = self.length
        for n in range(len(tails) - 1, -1, -1):
            if tails[n] > _NEVER and self.reach:
                tails[n] = max(tails[n], self._busy(n, tails, self._later, range(self.reach + 1)))
            time = tails[n] + length[n]
            for before, transfer in self.before[n]:
                if time + transfer > tails[before]:
                    tails[before] = time + transfer
        return tails

    @cached_property
    def _earlier(self) -> list[list[int]]:
        """For every pass of microbatch 0, itself and the passes of that microbatch and rank that always precede it."""
        path = [*range(self.stages), *reversed(range(self.stages))]
        ranks = self.setting.placement.stage_to_rank
        along = [[k for k in range(n + 1) if ranks[path[k]] == ranks[path[n]]] for n in range(len(path))]
        return along + [[*along[self.b(stage, 0)], self.w(stage, 0)] for stage in range(self.stages)]

    @cached_property
    def _later(self) -> list[list[int]]:
        """For every pass of microbatch 0, itself and the passes of that microbatch and rank that always follow it."""
        return [[n for n, earlier in enumerate(self._earlier) if k in earlier] for k in range(3 * self.stages)]

    def _busy(self, n: int, times: Sequence[float], same: Sequence[Sequence[int]], lags: range) -> float:
        """Return the least time in which the rank of pass ``n`` can run the passes ``same`` of the microbatches at
        ``lags``, none of them before its entry in ``times``. Microbatches keep their order.
        """
        j, own = divmod(n, 3 * self.stages)
        end = 0.0
        others = [k + (j + lag) * 3 * self.stages for lag in lags if 0 <= j + lag < self.setting.m for k in same[own]]
        for time, k in sorted((times[k], k) for k in others if k != n):
            if time > _NEVER:
                end = max(end, time) + self.length[k]
        return end

    def bound(self, rank: int | None) -> float:
        """Return a bound on the span of ``rank``, or on the makespan (None): the largest bound over all machines."""
        s = self.setting
        own = range(s.num_ranks) if rank is None else (rank,)
        stages = [k for r in own for k in s.stages(r)]
        heads = self.heads(self.f(min(stages), 0))
        tails = self.tails(self.w(k, s.m - 1) for k in stages)
        return max(one_machine_bound(self._jobs(machine, heads, tails)) for machine in range(s.num_ranks))

    def _jobs(self, rank: int, heads: Sequence[float], tails: Sequence[float]) -> Iterable[tuple[float, float, float]]:
        for stage in self.setting.stages(rank):
            for first in (self.f(stage, 0), self.b(stage, 0), self.w(stage, 0)):
                for n in range(first, len(heads), 3 * self.stages):
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
            yield Kind.B, k, lags[k], 0.0
        if k <= stage and s.g[k] > 0:
            lag = s.fits(s.g[k], limit - upper) + 1
            yield Kind.W, k, lag, 0.0
    last = chunks[-1]
    for lag in range(lags[last], min(lags[last] + _ROUNDS, s.m)):
        # Passes of later chunks that F on this stage is known to follow.
        counts = [lag + 1 if k <= stage else max(0, lag - lags[k] + 1) for k in chunks]
        yield Kind.B, last, lag, max(0.0, time_to_make_room(s, rank, counts) - s.b[last])

"""Bounds by longest paths, as in ``paths``, with the passes of vocabulary parallelism.

The arguments of ``paths`` hold for any flow in which every pass takes inputs of its own microbatch: the k-th S (T, I,
J or L) of a rank can be relabelled as that of microbatch k. So the graph has the passes and the transfers of the flow,
the order of microbatches, and the order that memory enforces; S and T compete with the other passes for their rank,
and whatever waits for a barrier waits for the slowest rank.

A rank's first pass is its I for microbatch 0: every other pass of the rank needs the first F of the pipeline, which
takes the sum of all I. So the span of a rank starts with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from megatron.zero_bubble.core.analysis.bounds.jackson import Job, one_machine_bound
from megatron.zero_bubble.core.analysis.bounds.paths import forced_by_memory
from megatron.zero_bubble.core.analysis.bounds.setting import Setting
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.costs.vocabulary import required
from megatron.zero_bubble.core.ir import Chain, Kind, Pass
from megatron.zero_bubble.core.ir.passes import VOCABULARY_KINDS, I, J, L, S, T, W
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, Vocabulary

_NEVER = -math.inf


class VocabularyPaths:
    """The graph of the passes of a setting, numbered by microbatch, then in the order of a microbatch on its own.

    Attributes:
        size: the number of passes.
    """

    def __init__(self, setting: Setting, costs: PassCosts, algorithm: Algorithm) -> None:
        self._setting, self._costs, self._figures = setting, costs, required(costs.vocabulary)
        self._flow = Vocabulary(Chain(setting.num_stages), setting.num_ranks, algorithm)
        self._order = tuple(self._microbatch())
        self._number = {p: n for n, p in enumerate(self._order)}
        self._rank_of = [setting.placement.stage_to_rank[p.stage] for p in self._order]
        self._length = [self._duration(p) for p in self._order] * setting.m
        self.size = len(self._length)

    def bound(self, rank: int | None) -> float:
        """Return a bound on the span of ``rank``, or on the makespan (None): the largest bound over all machines."""
        heads = self._heads(self._number[Pass(rank or 0, I, 0)])
        own = range(self._setting.num_ranks) if rank is None else (rank,)
        tails = self._tails({n for n, r in enumerate(self._rank_of) if r in own})
        return max(one_machine_bound(self._jobs(machine, heads, tails)) for machine in range(self._setting.num_ranks))

    def _microbatch(self) -> Iterator[Pass]:
        """Yield the passes of microbatch 0, each after those that it takes inputs of."""
        stages, shards = range(self._setting.num_stages), self._flow.shards
        yield from shards(I, 0)
        yield from (Pass(stage, Kind.F, 0) for stage in stages)
        yield from shards(S, 0)
        yield Pass(self._flow.last, L, 0)
        yield from shards(T, 0)
        yield from (Pass(stage, Kind.B, 0) for stage in reversed(stages))
        yield from (Pass(stage, W, 0) for stage in stages)
        yield from shards(J, 0)

    def _duration(self, p: Pass) -> float:
        if p.kind in VOCABULARY_KINDS:
            return self._figures.duration(p)
        return {Kind.F: self._setting.f, Kind.B: self._setting.b, W: self._setting.w}[p.kind][p.stage]

    @cached_property
    def _before(self) -> Sequence[Sequence[tuple[int, int, float]]]:
        """For every pass of a microbatch, the passes that must end before it starts: their number in their microbatch,
        how many microbatches earlier they are, and the least time from their end to its start.
        """
        edges = []
        for n, p in enumerate(self._order):
            before = [(n, 1, 0.0)]
            for producer in dict.fromkeys(value.producer for value in self._flow.inputs(p)):
                source = self._number[producer]
                before.append((source, 0, self._hop_ms(p, producer, self._rank_of[source], self._rank_of[n])))
            if p.kind is Kind.F:
                forced = forced_by_memory(self._setting, p.stage)
                before += [(self._number[Pass(k, kind, 0)], lag, ms) for kind, k, lag, ms in forced]
            edges.append(before)
        return edges

    def _hop_ms(self, p: Pass, producer: Pass, source: int, rank: int) -> float:
        if source == rank:
            return 0.0
        collective = p.kind in VOCABULARY_KINDS or producer.kind in VOCABULARY_KINDS
        return self._costs.comm(source, rank) + (self._figures.collective_ms if collective else 0.0)

    def _heads(self, origin: int) -> list[float]:
        """Return the least time from the start of pass ``origin`` to the start of each pass; -inf without a path."""
        heads, length, step = [_NEVER] * self.size, self._length, len(self._order)
        heads[origin] = 0.0
        for n in range(origin + 1, self.size):
            first = n - n % step
            for source, lag, ms in self._before[n - first]:
                before = first + source - lag * step
                if before >= 0 and heads[before] + length[before] + ms > heads[n]:
                    heads[n] = heads[before] + length[before] + ms
        return heads

    def _tails(self, ends: Iterable[int]) -> list[float]:
        """Return the least time from the end of each pass to the end of any pass in ``ends``, which are numbers in the
        last microbatch; -inf without a path.
        """
        tails, length, step = [_NEVER] * self.size, self._length, len(self._order)
        for n in ends:
            tails[self.size - step + n] = 0.0
        for n in reversed(range(self.size)):
            first, time = n - n % step, tails[n] + length[n]
            for source, lag, ms in self._before[n - first]:
                before = first + source - lag * step
                if before >= 0 and time + ms > tails[before]:
                    tails[before] = time + ms
        return tails

    def _jobs(self, machine: int, heads: Sequence[float], tails: Sequence[float]) -> Iterator[Job]:
        for own, rank in enumerate(self._rank_of):
            if rank == machine:
                for n in range(own, self.size, len(self._order)):
                    if heads[n] > _NEVER and tails[n] > _NEVER:
                        yield heads[n], self._length[n], tails[n]

"""A scheduling problem as plain lists, for the hot loops of the search.

All microbatches of a stage are alike, so running them in order excludes no better schedule (exchange argument). The
schedule of a rank is therefore a row of *codes* ``3 * stage + kind``, with kind 0 for F, 1 for B and 2 for W; the n-th
occurrence of a code is for microbatch n.

A backward is *fused* (one BW instead of B and W) exactly where its W directly follows its B, and what B leaves for W
would not fit into memory: a BW keeps the activation until its end, and leaves nothing. Fused backwards send their
gradient later, so nothing is gained by fusing others. Only stages whose B leaves more than it frees have any, such as
with full recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, repeat
from math import ceil
from operator import add
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.score import ROUNDING
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Chain, Kind, Pass, Placement, Schedule
from megatron.zero_bubble.core.ir.workload import Workload

Rows = list[list[int]]
"""The codes of each rank, first to last."""

F, B, W = 0, 1, 2
NONE = -1
_KINDS = (Kind.F, Kind.B, Kind.W)


class Tables(NamedTuple):
    """Properties of passes, by code.

    Attributes:
        rank: the rank that runs the code.
        duration: duration in ms.
        source: the code whose n-th pass must end ``hop`` ms before the n-th pass of this code starts; NONE if it waits
            for no code.
        hop: transfer time of its input in ms.
        successor: the code that uses this code's output, an activation or gradient; NONE if there is none.
        wgrad: the W that this code makes possible; NONE if there is none.
        receiver: the rank to which the output is sent; NONE if it stays on the rank, or there is no successor.
        delta: the change of the rank's memory.
    """

    rank: list[int]
    duration: list[float]
    source: list[int]
    hop: list[float]
    successor: list[int]
    wgrad: list[int]
    receiver: list[int]
    delta: list[float]


@lru_cache(maxsize=16)
def _routes(rank_of: tuple[int, ...]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Compute the columns ``source``, ``successor``, ``wgrad`` and ``receiver`` for a chain of stages."""
    flow = Chain(len(rank_of))
    passes = (Pass(stage, kind, 0) for stage in range(len(rank_of)) for kind in _KINDS)
    codes = {p: code for code, p in enumerate(passes)}
    source, successor, wgrad, receiver = ([NONE for _ in codes] for _ in range(4))
    for p, code in codes.items():
        if (feeder := flow.source(p)) is not None:
            source[code] = codes[feeder]
            (wgrad if p.kind is Kind.W else successor)[codes[feeder]] = code
            if rank_of[feeder.stage] != rank_of[p.stage]:
                receiver[codes[feeder]] = rank_of[p.stage]
    return source, successor, wgrad, receiver


@dataclass(frozen=True)
class Problem:
    """A scheduling problem: costs, memory, memory limit and objective.

    ``forward``, ``backward`` and ``wgrad`` are ms per stage, with the messages of a pass; ``activation_hop[s]`` is the
    transfer time of an activation into stage s, and ``gradient_hop[s]`` that of a gradient; ``kept`` and
    ``kept_by_wgrad`` are memory from F to B and from B to W per stage; ``limit`` is memory per rank. The cost of a
    schedule is the maximum over ranks of (end of the rank - ``origin[rank]``).
    """

    placement: Placement
    num_microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    wgrad: tuple[float, ...]
    activation_hop: tuple[float, ...]
    gradient_hop: tuple[float, ...]
    kept: tuple[float, ...]
    kept_by_wgrad: tuple[float, ...]
    limit: tuple[float, ...]
    origin: tuple[float, ...]

    @classmethod
    def of(
        cls, work: Workload, costs: PassCosts, memory: PassMemory, limit: Sequence[float], objective: Metric
    ) -> Problem:
        """Make the problem of ordering this work; ``costs`` and ``memory`` are converted to its stages."""
        placement = work.placement
        costs, memory = costs.fit(placement), memory.fit(placement)
        messages = tuple(map(sum, costs.messages_on(placement)))
        forward, backward = (tuple(map(add, ms, messages)) for ms in (costs.forward_ms, costs.backward_ms))
        activation_hop, gradient_hop = costs.hops(placement)
        arrival = [0.0]
        for s in range(1, placement.num_stages):
            arrival.append(arrival[-1] + forward[s - 1] + activation_hop[s])
        starts = tuple(arrival[placement.stages_of(rank)[0]] for rank in range(placement.num_ranks))
        return cls(
            placement,
            work.num_microbatches,
            forward,
            backward,
            costs.wgrad_ms,
            activation_hop,
            gradient_hop,
            memory.activation,
            memory.wgrad,
            tuple(amount * (1 + ROUNDING) for amount in limit),
            # The first pass of a rank is F0 of its first stage, which nothing delays: its span starts at a known time.
            starts if objective == "span" else (0.0,) * len(starts),
        )

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def is_line(self) -> bool:
        return self.num_stages == self.num_ranks

    @cached_property
    def is_vee(self) -> bool:
        """Whether every rank has two stages in a V; also a part of the ranks of a V is one."""
        return self.placement == Placement.vee(self.num_ranks)

    @cached_property
    def is_loop(self) -> bool:
        """Whether every rank has several stages in a loop."""
        chunks, rest = divmod(self.num_stages, self.num_ranks)
        return chunks > 1 and not rest and self.placement == Placement.interleaved(self.num_ranks, chunks)

    @property
    def share_of_a_vee(self) -> float:
        """The share of its budget that a search can afford with more stages per rank than a V has, so that it takes as
        long as on a V: its rows are longer.
        """
        return min(1.0, 2 * self.num_ranks / self.num_stages)

    @cached_property
    def tables(self) -> Tables:
        rank_of = self.placement.stage_to_rank
        durations = zip(self.forward, self.backward, self.wgrad, strict=True)
        hops = zip(self.activation_hop, self.gradient_hop, (0.0,) * self.num_stages, strict=True)
        kept = zip(self.kept, self.kept_by_wgrad, strict=True)
        source, successor, wgrad, receiver = _routes(rank_of)
        return Tables(
            rank=[rank for rank in rank_of for _ in (F, B, W)],
            duration=list(chain.from_iterable(durations)),
            source=source,
            hop=list(chain.from_iterable(hops)),
            successor=successor,
            wgrad=wgrad,
            receiver=receiver,
            delta=[change for whole, part in kept for change in (whole, part - whole, -part)],
        )

    @cached_property
    def mirrored(self) -> Problem:
        """The problem reversed in time: F and B swap their roles; W, which only fills gaps, keeps its role."""
        activation_hop = (0.0, *self.gradient_hop[:-1])
        gradient_hop = (*self.activation_hop[1:], 0.0)
        return Problem(
            self.placement, self.num_microbatches, self.backward, self.forward, self.wgrad,
            activation_hop, gradient_hop, self.kept, self.kept_by_wgrad, self.limit, (0.0,) * self.num_ranks,
        )  # fmt: skip

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The time in ms for which its passes, with their messages, occupy each rank."""
        per_stage = [sum(passes) for passes in zip(self.forward, self.backward, self.wgrad, strict=True)]
        stages_of = self.placement.stages_of
        return tuple(self.num_microbatches * sum(per_stage[s] for s in stages_of(r)) for r in range(self.num_ranks))

    @cached_property
    def room(self) -> float:
        """The memory limit in units of 1F1B's peak, of the rank with the most."""
        stages_of = self.placement.stages_of
        whole = (self.num_ranks * sum(self.kept[s] for s in stages_of(rank)) for rank in range(self.num_ranks))
        return max(limit / peak for limit, peak in zip(self.limit, whole, strict=True))

    @cached_property
    def least_memory(self) -> tuple[float, ...]:
        """Peak memory of a single microbatch per rank, which is the minimum for any schedule: F on all its stages,
        followed by backwards, which are fused if need be.
        """
        return tuple(sum(self.kept[s] for s in self.placement.stages_of(rank)) for rank in range(self.num_ranks))

    @cached_property
    def may_fuse(self) -> bool:
        """Whether the B of a stage leaves more memory for its W than it frees."""
        return any(change > 0 for change in self.tables.delta[B::3])

    def fused(self, rows: Rows) -> list[bytearray] | None:
        """Mark the places of the B of fused backwards, by rank; None if the rows do not fit in memory."""
        delta = self.tables.delta
        marks = []
        for row, limit in zip(rows, self.limit, strict=True):
            own = bytearray(len(row))
            kept, waiting = 0.0, [0] * self.num_stages if self.may_fuse else None
            for place, code in enumerate(row):
                kept += delta[code]
                if delta[code] > 0 and kept > limit:
                    is_pair = code % 3 == B and row[place + 1 : place + 2] == [code + 1]
                    if not is_pair or waiting is None or waiting[code // 3]:
                        return None
                    own[place] = True
                if waiting is not None and code % 3 != F:
                    waiting[code // 3] += 1 if code % 3 == B else -1
            marks.append(own)
        return marks

    def shortened(self, num_microbatches: int) -> Problem:
        """This problem with fewer microbatches."""
        return replace(self, num_microbatches=num_microbatches)

    def miniature(self, num_ranks: int) -> Problem:
        """Return a similar problem with at most ``num_ranks`` evenly chosen ranks, and few microbatches, but enough for
        a warm-up, a steady state and a cool-down; the problem itself if it is not larger.
        """
        p, rank_of = self.num_ranks, self.placement.stage_to_rank
        # On one rank, a loop of two stages would be a V.
        most = min(p, max(num_ranks, 2 if self.is_loop else 1))
        chosen = sorted({rank * (p - 1) // max(1, most - 1) for rank in range(most)})
        few = 2 * len(chosen) + 8
        m = few if self.num_microbatches > 1.25 * few else self.num_microbatches
        if (len(chosen), m) == (p, self.num_microbatches):
            return self
        stages = [s for s, rank in enumerate(rank_of) if rank in set(chosen)]
        part = len(chosen) / p

        def of(figures: Sequence[float]) -> tuple[float, ...]:
            return tuple(figures[s] for s in stages)

        limit = tuple(self._part_of_limit(rank, part) for rank in chosen)
        return Problem(
            Placement(tuple(chosen.index(rank_of[s]) for s in stages)), m,
            of(self.forward), of(self.backward), of(self.wgrad), of(self.activation_hop), of(self.gradient_hop),
            of(self.kept), of(self.kept_by_wgrad), limit, tuple(part * self.origin[rank] for rank in chosen),
        )  # fmt: skip

    def _part_of_limit(self, rank: int, part: float) -> float:
        """Scale the limit to whole microbatches, rounded up: a pattern needs a share of the ranks, plus one."""
        one = sum(self.kept[s] for s in self.placement.stages_of(rank))
        count = ceil(part * self.limit[rank] / one + (1 - part) - 1e-6)
        return max(self.least_memory[rank], count * one * (1 + ROUNDING))

    @property
    def is_feasible(self) -> bool:
        """Whether the limit admits any schedule, at least one microbatch at a time."""
        return all(least <= limit for least, limit in zip(self.least_memory, self.limit, strict=True))

    def rows(self, schedule: Schedule) -> Rows:
        """Convert a schedule of this placement to codes; each BW becomes a B followed by its W, which is fused only
        where it has to be.

        Raises:
            UserError: when the flow of the schedule is not a chain, the only flow that the search supports.
        """
        if type(schedule.flow) is not Chain:  # a subclass may have more dependencies
            raise UserError(
                f"the search supports only schedules of a chain of stages; {schedule.name!r} has the flow "
                f"{type(schedule.flow).__name__}; leave out the search, or start it from another schedule"
            )
        codes = {Kind.F: (F,), Kind.B: (B,), Kind.W: (W,), Kind.BW: (B, W)}
        return [[3 * p.stage + code for p in row for code in codes[p.kind]] for row in schedule.order]

    def schedule(self, name: str, rows: Rows) -> Schedule:
        order = []
        for row in rows:
            passes = {
                code: map(Pass, repeat(code // 3), repeat(_KINDS[code % 3]), range(self.num_microbatches))
                for code in set(row)
            }
            order.append([next(passes[code]) for code in row])
        if self.may_fuse:
            order = [self._with_fused(*row) for row in zip(order, self.fused(rows) or (), strict=True)]
        return Schedule(name, self.placement, self.num_microbatches, tuple(map(tuple, order)))

    def _with_fused(self, row: Sequence[Pass], marks: Sequence[int]) -> list[Pass]:
        """Replace each marked B and the W behind it by a BW."""
        after_marked = (0, *marks)
        return [
            p._replace(kind=Kind.BW) if is_fused else p
            for p, is_fused, was_fused in zip(row, marks, after_marked, strict=False)
            if not was_fused
        ]


def mirrored(rows: Rows) -> Rows:
    """Reverse rows in time: F and B swap their roles."""
    return [[code + (1, -1, 0)[code % 3] for code in reversed(row)] for row in rows]

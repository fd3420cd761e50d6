"""Search for schedules of sequence slices: every rank takes the most urgent pass that is ready and fits into memory.

The published orders of slices are for equal passes and one stage per rank. Here a rank that is free runs a B if one is
ready, else the F of its last stage for which one is ready, else a W; with a W, it waits for the next B or F only if
that is closer than a share of the W's time (``eagerness``). Memory limits how many F run ahead: there is always enough
left to finish the oldest microbatch of which the rank has not run all forwards, so the ranks cannot block each other.
The best of several shares and limits is compared with the known schedules that fit.

Where B leaves more than it frees, or the limit leaves no room for that, some tries also fuse backwards: a B that does
not fit although no W is left to run becomes a BW.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import chain, product
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.score import ROUNDING, Goal
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.messages import occupied
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Chain, Pass, Placement, Schedule, Slices
from megatron.zero_bubble.core.ir.passes import BW, B, F, W

_EAGERNESS = (0.0, 0.5, 1.0)
_PARTS_OF_LIMIT = (1.0, 0.75, 0.5)
_MANY = 12_000
"""From this number of passes on, each costs too much time to try several parts of the limit."""


def sliced_auto(
    figures: Callable[[Placement], tuple[PassCosts, PassMemory]],
    placements: Sequence[Placement],
    num_microbatches: int,
    slices: Slices,
    goal: Goal,
    known: Sequence[Schedule] = (),
) -> Schedule:
    """Search for the best schedule of ``slices`` within a memory limit.

    Args:
        figures: the costs and the memory of a microbatch on each placement.
        placements: those to try.
        known: schedules of these slices; the result is not longer than one of them that is within the limit.

    Raises:
        UserError: when not even one microbatch at a time fits; the message gives the least limit.
    """
    best: tuple[float, Schedule] | None = None
    problems = [_Problem(*figures(on), on, num_microbatches, slices) for on in placements]
    for problem in problems:
        own = (schedule for schedule in known if schedule.placement == problem.placement)
        for schedule in chain(own, _candidates(problem, goal.most)):
            timeline = simulate(schedule, problem.costs, problem.memory)
            over, ms = goal.value(timeline, max(most_kept(timeline, problem.memory)))
            if not over and (best is None or ms < best[0] * (1 - ROUNDING)):
                best = ms, schedule
    if best is None:
        least = min(_enough(problem) for problem in problems)
        raise UserError(
            f"the memory limit admits no schedule of {len(slices)} slices: it is {goal.most:g} per rank, and one "
            f"whole microbatch at a time needs up to {least:.10g} on the fullest rank; raise the limit to that"
        )
    return replace(best[1], name="zb-auto")


class _Problem(NamedTuple):
    """What a search is given, but for its limit."""

    costs: PassCosts
    memory: PassMemory
    placement: Placement
    num_microbatches: int
    slices: Slices


def _candidates(problem: _Problem, limit: float) -> Iterator[Schedule]:
    memory, slices = problem.memory, problem.slices
    passes = 3 * problem.placement.num_stages * problem.num_microbatches * len(slices)
    grows = any(left > freed for left, freed in zip(memory.wgrad, memory.activation, strict=True))
    may_fuse = (False, True) if grows or limit < _enough(problem, fused=False) else (False,)
    parts = _PARTS_OF_LIMIT[: 1 if passes > _MANY else None]
    for fused, part, eagerness in product(may_fuse, parts, _EAGERNESS):
        found = _Search(problem, part * limit, eagerness, fused).run()
        if found is not None:
            yield found


def _enough(problem: _Problem, fused: bool = True) -> float:
    """A limit that admits one microbatch at a time on every rank."""
    memory, placement, slices = problem.memory, problem.placement, problem.slices
    ranks = (placement.stages_of(rank) for rank in range(placement.num_ranks))
    return max(_of_forwards(memory, stages, slices) + _of_backwards(memory, stages, slices, fused) for stages in ranks)


def _of_forwards(memory: PassMemory, stages: Sequence[int], slices: Slices) -> float:
    """What all forwards of a microbatch add to the memory of a rank with ``stages``."""
    passes = (Pass(stage, F, 0, slice_) for stage in stages for slice_ in range(len(slices)))
    return sum(sum(memory.changes(p, slices)) for p in passes)


def _of_backwards(memory: PassMemory, stages: Sequence[int], slices: Slices, fused: bool) -> float:
    """What the backwards of a microbatch need in addition, if each B is followed by its W, or fused with it.

    The gradients of keys and values, and the operands of W and the gradient of a state where they are larger than what
    B frees.
    """
    gradients = {stage: memory.history_gradients(stage, slices) for stage in stages}
    kind, last = BW if fused else B, len(slices) - 1
    growth = (
        sum(memory.changes(Pass(stage, kind, 0, slice_), slices)) - (gradients[stage] if slice_ == last else 0.0)
        for stage in stages
        for slice_ in range(len(slices))
    )
    return sum(gradients.values()) + max(0.0, *growth)


class _Search:
    """One run over all passes, in order of time."""

    def __init__(self, problem: _Problem, limit: float, eagerness: float, fused: bool) -> None:
        costs, memory, placement, num_microbatches, slices = problem
        self._costs, self._memory, self._slices = occupied(costs, placement), memory, slices
        self._placement, self._num_microbatches = placement, num_microbatches
        self._eagerness, self._fused = eagerness, fused
        self._flow = Chain(placement.num_stages, len(slices))
        ranks = range(placement.num_ranks)
        # A B must always be able to run, so forwards leave room for it.
        self._limit = limit * (1 + ROUNDING)
        self._left_free = [_of_backwards(memory, placement.stages_of(rank), slices, fused) for rank in ranks]
        self._rows: list[list[Pass]] = [[] for _ in ranks]
        self._kept = [0.0] * len(ranks)
        self._free = [0.0] * len(ranks)
        self._pending: list[deque[Pass]] = [deque() for _ in ranks]
        self._left = {p: len(self._flow.inputs(p)) for p in self._passes()}
        self._ready: list[list[tuple[float, Pass]]] = [[] for _ in ranks]
        self._microbatch = [_of_forwards(memory, placement.stages_of(rank), slices) for rank in ranks]
        self._to_forward = [[whole] * num_microbatches for whole in self._microbatch]
        self._oldest = [0] * len(ranks)
        self._arrival: dict[Pass, float] = {}

    def _passes(self) -> Iterator[Pass]:
        for stage, kind, microbatch, slice_ in product(
            range(self._placement.num_stages), (F, B), range(self._num_microbatches), range(len(self._slices))
        ):
            yield Pass(stage, kind, microbatch, slice_)

    def run(self) -> Schedule | None:
        for p in list(self._left):
            # Forwards of a stage run in the order of the data, whatever arrives first.
            if p.kind is F and not p.slice and p.microbatch:
                self._left[p] += 1
        for p, left in self._left.items():
            if not left:
                self._offer(p, 0.0)
        events = [(0.0, rank) for rank in range(self._placement.num_ranks)]
        while events:
            now, rank = heappop(events)
            if now < self._free[rank]:
                continue
            for at, other in self._step(rank, now):
                heappush(events, (at, other))
        backwards = sum(p.kind in (B, BW) for row in self._rows for p in row)
        if backwards < len(self._left) // 2:
            return None
        order = tuple((*row, *rest) for row, rest in zip(self._rows, self._pending, strict=True))
        return Schedule("zb-auto", self._placement, self._num_microbatches, order, self._slices)

    def _step(self, rank: int, now: float) -> list[tuple[float, int]]:
        """Run the most urgent pass of a free rank; returns when which rank may run its next one."""
        ready = [(at, p) for at, waiting in self._ready[rank] for p in self._ways(rank, waiting)]
        present = [p for at, p in ready if at <= now]
        if present:
            return self._place(rank, now, min(present, key=_urgency))
        coming = min((at for at, _ in ready), default=math.inf)
        if self._pending[rank]:
            w = self._pending[rank][0]
            crowded = any(at <= now for at, _ in self._ready[rank])
            if crowded or coming - now >= self._eagerness * self._costs.duration(w, self._slices):
                return self._place(rank, now, self._pending[rank].popleft())
        return [(coming, rank)] if math.isfinite(coming) else []

    def _ways(self, rank: int, p: Pass) -> Iterator[Pass]:
        """Yield ``p`` if there is room for it, or the BW that it becomes otherwise."""
        if self._fits(rank, p):
            yield p
        elif self._fused and p.kind is B and not self._pending[rank] and self._fits(rank, p._replace(kind=BW)):
            yield p._replace(kind=BW)

    def _fits(self, rank: int, p: Pass) -> bool:
        """Whether there is room for ``p``; an F must leave what the rest of the oldest microbatch needs.

        The oldest microbatch is the first whose forwards are not complete.
        """
        start, end = self._memory.changes(p, self._slices)
        needed = self._kept[rank] + max(start, start + end)
        if p.kind is F:
            needed += self._left_free[rank]
            if p.microbatch != self._oldest[rank]:
                needed += self._to_forward[rank][self._oldest[rank]]
        return needed <= self._limit

    def _place(self, rank: int, now: float, p: Pass) -> list[tuple[float, int]]:
        end = now + self._costs.duration(p, self._slices)
        self._rows[rank].append(p)
        self._free[rank] = end
        self._kept[rank] += sum(self._memory.changes(p, self._slices))
        if p.kind is W:
            return [(end, rank)]
        is_fused, p = p.kind is BW, p._replace(kind=B if p.kind is BW else p.kind)
        self._ready[rank] = [(at, other) for at, other in self._ready[rank] if other != p]
        if p.kind is F:
            left = self._to_forward[rank]
            left[p.microbatch] -= sum(self._memory.changes(p, self._slices))
            rounding = ROUNDING * self._microbatch[rank]
            while self._oldest[rank] < self._num_microbatches - 1 and left[self._oldest[rank]] < rounding:
                self._oldest[rank] += 1
        elif not is_fused:
            self._pending[rank].append(p._replace(kind=W))
        woken = [(end, rank)]
        for follower in self._followers(p):
            if follower.kind is W:
                continue
            to = self._placement.stage_to_rank[follower.stage]
            at = end + self._costs.comm(rank, to)
            self._arrival[follower] = max(at, self._arrival.get(follower, 0.0))
            self._left[follower] -= 1
            if not self._left[follower]:
                self._offer(follower, self._arrival[follower])
                woken.append((max(self._arrival[follower], self._free[to]), to))
        return woken

    def _followers(self, p: Pass) -> Iterator[Pass]:
        for value in self._flow.outputs(p):
            yield from self._flow.consumers(value)
        if p.kind is F and p.slice == len(self._slices) - 1 and p.microbatch < self._num_microbatches - 1:
            yield Pass(p.stage, F, p.microbatch + 1)

    def _offer(self, p: Pass, at: float) -> None:
        self._ready[self._placement.stage_to_rank[p.stage]].append((at, p))


def _urgency(p: Pass) -> tuple[int, int, int, int]:
    """Backwards before F; the oldest microbatch of the stage that is nearest to the end of its direction."""
    if p.kind is not F:
        return 0, p.microbatch, p.stage, -p.slice
    return 1, -p.stage, p.microbatch, p.slice

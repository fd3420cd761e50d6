"""Search for the layout with which a given schedule is shortest, within a memory limit.

The schedule stays as it is; only the number of layers per stage, and so the times and the memory of the passes, change.
Where there are few layouts, all are compared. Otherwise single layers are moved between stages, from several starts,
while this makes the schedule shorter. In both cases, a layout is not simulated if the work of its busiest rank alone
takes longer than the best schedule so far. The effort is counted in simulated passes, so that the result does not
depend on the speed of the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, repeat
from operator import sub
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.score import ROUNDING, Goal, excess, is_less, length_ms
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.layers import LayerCosts
from megatron.zero_bubble.core.ir import Kind, Schedule
from megatron.zero_bubble.core.ir.garbage import without_gc
from megatron.zero_bubble.core.ir.schedule import chain_of
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search.cut import least_layers, transfers
from megatron.zero_bubble.core.search.loops import compiled, loops
from megatron.zero_bubble.core.search.problem import Problem

Layout = tuple[int, ...]
"""Layers per stage, in model order."""

_BUDGET, _BUDGET_IN_PYTHON = 10_000_000, 400_000
"""Most passes to simulate with the compiled loops, and without."""
_OVERHEAD_PER_STAGE = 400
"""Passes whose simulation takes as long as everything else for one layout, per stage."""
_MOST_COMPARED = 10_000
"""The most layouts that are all compared."""


class LayoutValue(NamedTuple):
    """How good a layout is; the smallest is the best.

    Attributes:
        excess: the peak memory of the fullest rank if it is above the limit, else 0.
        ms: the objective.
        unevenness: the sum of squares of the work of the ranks, so that of equally long schedules the most even one is
            chosen, which needs less memory and is less sensitive to errors of the costs.
    """

    excess: float
    ms: float
    unevenness: float


class LayoutTrials:
    """Evaluates layouts for one schedule; equal layouts are simulated once.

    Args:
        layers: costs of the parts of the model.
        goal: what layouts are compared by.
        effort: the number of layouts to simulate, relative to the default.
        rated: returns the excess and the objective of a plan that has more than the passes of a chain; by default, the
            schedule alone is simulated.

    Attributes:
        value: simulates the schedule with a layout.
        least_ms: a lower bound of the objective with a layout: the work of the busiest rank.
        most: the number of layouts to simulate at most, if not all are compared.
        compared: the most layouts that are all compared.
    """

    def __init__(
        self,
        layers: LayerCosts,
        schedule: Schedule,
        goal: Goal,
        effort: float = 1.0,
        rated: Callable[[Layout], tuple[float, float]] | None = None,
    ) -> None:
        self._layers, self.schedule, self._limit = layers, schedule, goal.limit
        by_loops = None if rated is not None else _by_loops(schedule, goal.objective, goal.limit is not None)
        self._run = by_loops or _by_simulation(schedule, goal.objective)
        self._rated = rated or self._simulated
        hidden = [parts.all_to_all for parts in layers.experts] if schedule.overlaps else []
        computed = map(sub, layers.work_ms, hidden or repeat(0.0))
        self._work = [0.0, *accumulate((layers.embedding.work_ms, *computed, layers.loss.work_ms))]
        self.value = cache(self._evaluated)
        self.least_ms = cache(self._least_ms)
        budget = effort * (_BUDGET if by_loops and compiled() else _BUDGET_IN_PYTHON)
        self.most = int(budget) // (sum(map(len, schedule.order)) + _OVERHEAD_PER_STAGE * schedule.num_stages)
        self.compared = _MOST_COMPARED if rated is None else min(_MOST_COMPARED, self.most)

    def _evaluated(self, layout: Layout) -> LayoutValue:
        return LayoutValue(*self._rated(layout), math.fsum(work * work for work in self._work_of(layout)))

    def _simulated(self, layout: Layout) -> tuple[float, float]:
        peak, ms = self._run(*self._layers.on(layout))
        return excess(peak, self._limit), ms

    def _least_ms(self, layout: Layout) -> float:
        return self.schedule.num_microbatches * max(self._work_of(layout))

    def _work_of(self, layout: Layout) -> list[float]:
        """Return the time for which F, B and W of one microbatch compute, per rank."""
        placement = self.schedule.placement
        of_rank = [0.0] * placement.num_ranks
        end, last, work = 1, len(layout) - 1, self._work  # the embedding is part 0
        for stage, (count, rank) in enumerate(zip(layout, placement.stage_to_rank, strict=True)):
            start, end = end, end + count
            of_rank[rank] += work[end + (stage == last)] - work[start - (stage == 0)]
        return of_rank


def best_layout(trials: LayoutTrials, num_layers: int, starts: Iterable[Layout]) -> Layout:
    """Return the best layout that is found; it is not worse than any of ``starts``, of which there is at least one."""
    starts = list(dict.fromkeys(starts))
    least = least_layers(trials.schedule.placement)
    best = min(starts, key=trials.value)
    if number_of_layouts(num_layers, least) <= trials.compared:
        return _best_of(trials, layouts(num_layers, least), best)
    left = trials.most
    for start in sorted(starts, key=trials.value):
        found, left = _descended(trials, start, least, left)
        best = _better(trials, found, best)
    return best


def number_of_layouts(num_layers: int, least: Sequence[int]) -> int:
    free = num_layers - sum(least)
    return math.comb(free + len(least) - 1, len(least) - 1) if free >= 0 else 0


def layouts(num_layers: int, least: Sequence[int]) -> Iterator[Layout]:
    if len(least) == 1:
        yield (num_layers,)
        return
    for count in range(least[0], num_layers - sum(least[1:]) + 1):
        for rest in layouts(num_layers - count, least[1:]):
            yield (count, *rest)


def _best_of(trials: LayoutTrials, candidates: Iterable[Layout], best: Layout) -> Layout:
    for layout in sorted(candidates, key=trials.least_ms):
        if _cannot_win(trials, layout, trials.value(best)):
            return best
        best = _better(trials, layout, best)
    return best


def _descended(trials: LayoutTrials, layout: Layout, least: Sequence[int], left: int) -> tuple[Layout, int]:
    """Move single layers until nothing is better, or ``left`` layouts are simulated; also return how many are left."""
    tried = {layout}
    while True:
        value = trials.value(layout)
        moves = [other for other in transfers(layout, least) if other not in tried]
        for other in sorted(moves, key=trials.least_ms):
            if not left or _cannot_win(trials, other, value):
                return layout, left
            left -= 1
            tried.add(other)
            if is_less(trials.value(other), value):
                layout = other
                break
        else:
            return layout, left


def _cannot_win(trials: LayoutTrials, layout: Layout, value: LayoutValue) -> bool:
    """Whether even an uninterrupted run of the busiest rank would take longer."""
    return not value.excess and trials.least_ms(layout) > value.ms * (1 + ROUNDING)


def _better(trials: LayoutTrials, layout: Layout, other: Layout) -> Layout:
    return layout if is_less(trials.value(layout), trials.value(other)) else other


Rating = Callable[[PassCosts, PassMemory], tuple[float, float]]
"""Returns the peak memory of the fullest rank (0 if it is not needed), and the objective in ms."""


def _by_simulation(schedule: Schedule, objective: Metric) -> Rating:
    @without_gc()
    def run(costs: PassCosts, memory: PassMemory) -> tuple[float, float]:
        timeline = simulate(schedule, costs, memory)
        return max(most_kept(timeline, memory)), length_ms(timeline, objective)

    return run


def _by_loops(schedule: Schedule, objective: Metric, with_memory: bool) -> Rating | None:
    """Simulate with the loops of the search; None for schedules that they do not support."""
    placement, m = schedule.placement, schedule.num_microbatches
    fused = {p.kind is Kind.BW for p in schedule.passes() if p.kind is not Kind.F}
    if schedule.num_slices > 1 or schedule.evaluates or schedule.make_flow is not chain_of or len(fused) != 1:
        return None
    unlimited = (math.inf,) * placement.num_ranks
    held = [own for rank in range(placement.num_ranks if with_memory else 0) for own in _most_held(schedule, rank)]
    rows = None

    def run(costs: PassCosts, memory: PassMemory) -> tuple[float, float]:
        nonlocal rows
        if True in fused:  # the search runs a fused backward as a B and a W: here, the B takes all of its time
            whole = tuple(b + w for b, w in zip(costs.backward_ms, costs.wgrad_ms, strict=True))
            costs = replace(costs, backward_ms=whole, wgrad_ms=(0.0,) * len(whole))
        problem = Problem.of(Workload(placement, m), costs, memory, unlimited, objective)
        rows = problem.rows(schedule) if rows is None else rows
        loop = loops(problem)
        kept = (*memory.activation, *memory.wgrad)
        peak = max((sum(count * kept[place] for place, count in own) for own in held), default=0.0)
        return peak, loop.evaluate(loop.pack(rows))[0]

    return run


def _most_held(schedule: Schedule, rank: int) -> list[tuple[tuple[int, int], ...]]:
    """Return what a rank holds when it may hold the most: for each such moment, pairs of a place and a number.

    Places are stages, for activations, and then stages again, for what B leaves to W.
    """
    stages, n = schedule.placement.stages_of(rank), schedule.num_stages
    places = (*stages, *(n + stage for stage in stages))
    now = dict.fromkeys(places, 0)
    moments = set()
    row = schedule.order[rank]
    for p, following in zip(row, (*row[1:], None), strict=True):
        if p.kind is Kind.W:
            now[n + p.stage] -= 1
            continue
        now[p.stage] += 1 if p.kind is Kind.F else -1
        now[n + p.stage] += p.kind is Kind.B
        if following is None or following.kind is not Kind.F:  # an F only adds
            moments.add(tuple(now.values()))
    most: list[tuple[int, ...]] = []
    for one in sorted(moments, reverse=True):  # those that cover others come before these
        if not any(_covers(other, one) for other in most):
            most.append(one)
    return [tuple((place, count) for place, count in zip(places, one, strict=True) if count) for one in sorted(most)]


def _covers(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))

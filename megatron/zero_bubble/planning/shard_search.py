"""Choose sharded units: stages per rank, microbatches of a unit, and stages whose weights are whole at a time.

The best plan is the shortest one within the memory limit; of equally short ones, the one with the lowest peak of
memory, and then with the fewest gathers. More whole stages never make an iteration longer: they leave out some of the
gathers (the farthest next use makes room, so what k slots hold is among what k + 1 slots hold), and the others start
where they did. They never take less memory either. So a size of units is rated with as many whole stages as the limit
admits, and the fewest that are as fast are found by bisection. Lower bounds rule out sizes without a simulation.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from megatron.zero_bubble.core.analysis.memory import peaks_in_order
from megatron.zero_bubble.core.analysis.score import ROUNDING, within
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassMemory
from megatron.zero_bubble.core.costs.even import even_costs
from megatron.zero_bubble.core.costs.units import parse_memory_limit
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile
from megatron.zero_bubble.core.ir import Plan, Schedule
from megatron.zero_bubble.core.ir.shards import Gather
from megatron.zero_bubble.core.plan.shard import DEFAULT_OPEN_CHUNKS, Sharding
from megatron.zero_bubble.planning.figures import Figures, measured
from megatron.zero_bubble.planning.setup import Named, Setup
from megatron.zero_bubble.planning.shards import (
    Replicas,
    ShardPlan,
    lane_ms,
    lowered,
    of_schedule,
    static_bytes,
    with_collectives,
)
from megatron.zero_bubble.planning.unit_sizes import smallest, unit_sizes

Maker = Callable[[int | None], Schedule]
"""Makes a schedule for a size of its units; for None, a schedule without units to choose."""


def plan_shards(costs: Figures, makers: Sequence[Maker], has_units: bool, replicas: Replicas) -> ShardPlan:
    """Shard a schedule, and choose what ``replicas`` leaves open.

    Without times of gathers, all numbers of whole stages are equally fast. The default is taken then, or one stage if
    the limit does not admit the default.

    Args:
        makers: of the same schedule, one per number of stages per rank to choose from.
        has_units: whether the schedule has units whose size can be chosen.

    Raises:
        UserError: a schedule with one stage per rank.
    """
    sizes: Sequence[int | None] = [replicas.unit_microbatches]
    if has_units and replicas.unit_microbatches is None:
        sizes = _sizes(costs, min(replicas.limit, replicas.activation_limit))
    if replicas.open_chunks is None and not any(_gather_ms(costs, make(sizes[-1])) for make in makers):
        for whole in (DEFAULT_OPEN_CHUNKS, 1):
            found = plan_shards(costs, makers, has_units, replace(replicas, open_chunks=whole))
            if replicas.admits(found):
                break
        return found
    choices = [_Units(costs, make, unit, has_units, replicas) for make in makers for unit in sizes]
    if replicas.open_chunks is not None and len(choices) == 1:
        best, whole = choices[0], replicas.open_chunks
    else:
        best, whole = _best(choices)
    return of_schedule(costs, best.schedule(), best.sharding(whole), replicas.count)


def _sizes(costs: Figures, limit: float) -> list[int]:
    """Sizes of units; smaller than the pipeline only with a limit, because they keep less and wait more."""
    sizes = unit_sizes(costs.num_ranks, costs.num_microbatches)
    return [*(range(1, sizes[0]) if limit < math.inf else ()), *sizes]


def _gather_ms(costs: Figures, schedule: Schedule) -> float:
    return sum(costs.on(schedule.placement)[0].gather_ms)


class _Units:
    """One size of units and one number of stages per rank; the number of whole stages is open."""

    def __init__(self, costs: Figures, make: Maker, unit: int | None, has_units: bool, replicas: Replicas) -> None:
        self._costs, self._make, self._has_units, self._replicas = costs, make, has_units, replicas
        self._size = unit or costs.num_ranks
        self._ms: dict[int, float] = {}
        self._peaks: dict[int, float] = {}
        schedule = self.schedule()
        self._placement = schedule.placement
        self._times, self._memory = costs.on(self._placement)

    def schedule(self) -> Schedule:
        """Made again for every use: all of them together would take hundreds of megabytes."""
        return self._make(self._size if self._has_units else None)

    def sharding(self, whole: int) -> Sharding:
        return Sharding(self._size, whole)

    @property
    def counts(self) -> range:
        """The numbers of whole stages to choose from, ascending."""
        given = self._replicas.open_chunks
        if given is not None:
            return range(given, given + 1)
        return range(1, self._placement.num_stages // self._placement.num_ranks + 1)

    @property
    def least_ms(self) -> float:
        """A lower bound: the first rank begins a unit when a microbatch of the unit before has passed all stages, and
        has returned.
        """
        units = -(-self._costs.num_microbatches // self._size) if self._has_units else 1
        return units * (sum(self._times.forward_ms) + sum(self._times.backward_ms))

    @cached_property
    def activations(self) -> tuple[float, ...]:
        """Peak per rank."""
        return peaks_in_order(self.schedule(), self._memory)

    def peak(self, whole: int) -> float:
        """The peak of activations, and of static memory where its size is known, on the fullest rank."""
        sizes = self._costs.sizes_on(self._placement)
        if sizes is None:
            return max(self.activations)
        if whole not in self._peaks:
            static = static_bytes(self._plan(whole), sizes, self._replicas.count)
            self._peaks[whole] = max(map(sum, zip(self.activations, static, strict=True)))
        return self._peaks[whole]

    def most_within(self) -> int | None:
        """The largest number of whole stages within the limits of memory; None if there is none."""
        limit = self._replicas.limit
        least = max(self.activations)
        if not (
            within(least, min(limit, self._replicas.activation_limit)) and within(self.peak(self.counts[0]), limit)
        ):
            return None
        return next((whole for whole in reversed(self.counts) if within(self.peak(whole), limit)), None)

    def ms(self, whole: int, enough_ms: float) -> float:
        """The length of an iteration; or a lower bound on it, if it is above ``enough_ms``."""
        if whole not in self._ms:
            plan = self._plan(whole)
            self._ms[whole] = lane_ms(plan, self._times)
            if self._ms[whole] <= enough_ms:
                # The optimizer of sharded units waits for every rank.
                self._ms[whole] = simulate(plan, self._times, self._memory).makespan_ms
        return self._ms[whole]

    def fewest(self, most: int, enough_ms: float) -> int:
        """The fewest whole stages, up to ``most``, with which an iteration takes no longer than ``enough_ms``."""
        fewer = range(self.counts[0], most)
        return self.counts[0] + bisect_left(fewer, True, key=lambda whole: self.ms(whole, enough_ms) <= enough_ms)

    def gathers(self, whole: int) -> int:
        """Gathers of the rank with most."""
        return max(sum(isinstance(op, Gather) for op in row) for row in self._plan(whole).ops)

    def _plan(self, whole: int) -> Plan:
        return lowered(self.schedule(), self.sharding(whole))


def _best(choices: Sequence[_Units]) -> tuple[_Units, int]:
    """Return the best choice with its number of whole stages; the least memory if none is within the limit."""
    enough_ms = math.inf
    admitted: list[tuple[_Units, int]] = []
    for each in sorted(choices, key=lambda each: each.least_ms):
        if each.least_ms <= enough_ms and (most := each.most_within()) is not None:
            admitted.append((each, most))
            enough_ms = min(enough_ms, each.ms(most, enough_ms) * (1 + ROUNDING))
    if not admitted:
        least = min(choices, key=lambda each: each.peak(each.counts[0]))
        return least, least.counts[0]
    found: tuple[_Units, int] | None = None
    lowest = math.inf, 0
    for each, most in sorted(admitted, key=lambda pair: max(pair[0].activations)):
        if each.ms(most, enough_ms) > enough_ms or not within(each.peak(each.counts[0]), lowest[0]):
            continue
        whole = each.fewest(most, enough_ms)
        peak, gathers = each.peak(whole), each.gathers(whole)
        is_as_low = within(peak, lowest[0])
        if found is None or not within(lowest[0], peak) or (is_as_low and gathers < lowest[1]):
            found, lowest = (each, whole), (peak, gathers)
    assert found is not None, "the shortest is among them"
    return found


@dataclass(frozen=True)
class UnitChoice:
    """What the size of units is chosen by; by default, by passes of equal length.

    Attributes:
        memory_limit: limit of activation memory per rank, as in ``zero-bubble plan --memory-limit``; None for no limit.
        costs: times of passes and collectives, and memory, as a run has measured them; None if unknown.
        open_chunks: the most stages of a rank with whole weights; None if weights are not sharded.
    """

    memory_limit: str | None = None
    costs: CostsFile | None = None
    open_chunks: int | None = None

    @classmethod
    def of(cls, setup: Setup, order: Named, costs: CostsFile | None) -> UnitChoice:
        """That of a named schedule."""
        whole = None if setup.shards is None else setup.shards.whole_stages or DEFAULT_OPEN_CHUNKS
        return cls(order.limit, costs, None if whole == "auto" else whole)


def with_best_units(
    make: Callable[[int, int | None], Schedule], num_ranks: int, choice: UnitChoice, num_microbatches: int
) -> Schedule:
    """Choose the size of the units."""
    if choice.memory_limit is not None or choice.costs is not None:
        return _planned_units(partial(make, num_microbatches), num_ranks, choice, num_microbatches)

    def length_ms(unit: int) -> float:
        schedule = make(num_microbatches, unit)
        return simulate(schedule, even_costs(schedule.placement)).makespan_ms

    return make(num_microbatches, smallest(unit_sizes(num_ranks, num_microbatches), length_ms))


def _planned_units(
    make: Callable[[int | None], Schedule], num_ranks: int, choice: UnitChoice, num_microbatches: int
) -> Schedule:
    """Choose the size of the units as ``zero-bubble plan`` does.

    Raises:
        UserError: when no size is within the memory limit.
    """
    if choice.costs is None:
        figures = even_figures(num_ranks, num_microbatches)
    else:
        figures = measured(choice.costs, num_ranks, num_microbatches)
    if choice.memory_limit is not None and parse_memory_limit(choice.memory_limit)[1] != "p" and not figures.in_bytes:
        raise UserError(
            f"--zero-bubble-memory-limit {choice.memory_limit} for the units of zero-pp needs the activation memory of "
            "a microbatch in bytes; give the costs file of an earlier run with --zero-bubble-costs, or a limit in "
            "units of 1F1B's peak, such as 1p"
        )
    limit = math.inf if choice.memory_limit is None else figures.limit(choice.memory_limit)
    if choice.open_chunks is None:
        figures = with_collectives(figures, 1, 0.0, 0.0, None)
    replicas = Replicas(1, None, choice.open_chunks or DEFAULT_OPEN_CHUNKS, activation_limit=limit)
    found = plan_shards(figures, [make], True, replicas)
    if not replicas.admits(found):
        raise UserError(
            f"the activations of some size of units must fit into the memory limit of {choice.memory_limit}; got "
            f"{figures.show(max(found.activations))} per rank with units of {found.sharding.unit_microbatches}, which "
            "take least; raise --zero-bubble-memory-limit, or take more pipeline ranks or full recomputation"
        )
    return found.timeline.schedule


def even_figures(num_ranks: int, num_microbatches: int) -> Figures:
    """Figures of passes of equal length."""
    return Figures(num_ranks, num_microbatches, lambda on: (even_costs(on), PassMemory.uniform(on)))

"""Sharded units of a schedule: their collectives, and the memory that they take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.score import SHORTEST, within
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.static import StageBytes
from megatron.zero_bubble.core.costs.units import parse_memory_limit
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.schedule import SHARD_WEIGHTS, sharding_content
from megatron.zero_bubble.core.ir import Op, Placement, Plan, Schedule
from megatron.zero_bubble.core.ir.shards import Gather, Reduce
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.plan import Additions, plan_without_messages, prove
from megatron.zero_bubble.core.plan.shard import (
    DEFAULT_OPEN_CHUNKS,
    Sharding,
    check_chunks,
    most_whole,
    traffic_bytes,
)
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.given import Bandwidth
from megatron.zero_bubble.planning.part import Part
from megatron.zero_bubble.planning.plans import bound
from megatron.zero_bubble.planning.setup import Setup
from megatron.zero_bubble.planning.weights import PlannedWeights


@dataclass(frozen=True)
class Replicas:
    """The replicas that shard a pipeline.

    Attributes:
        count: their number.
        unit_microbatches: microbatches of a unit; None for the best.
        open_chunks: the most stages of a rank with whole weights; None for the best.
        limit: limit of memory per rank, in the unit of the costs; in bytes it includes what is static.
        activation_limit: limit of the activations of a rank alone, in the unit of the costs.
    """

    count: int
    unit_microbatches: int | None = None
    open_chunks: int | None = DEFAULT_OPEN_CHUNKS
    limit: float = math.inf
    activation_limit: float = math.inf

    @property
    def counts_weights(self) -> bool:
        """Whether the limit includes what is static."""
        return self.limit < math.inf

    def within(self, limit: float | None) -> Replicas:
        """The same with another limit, or without any."""
        other = math.inf if limit is None else limit
        return replace(self, limit=other if self.counts_weights else math.inf, activation_limit=other)

    def admits(self, plan: ShardPlan) -> bool:
        """Whether a plan is within the limits."""
        return within(max(plan.peaks), self.limit) and within(max(plan.activations), self.activation_limit)

    def bytes_of(
        self, parts: Iterable[Part], costs: Figures, placement: Placement
    ) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """Bytes that every rank sends to its replicas, and its static bytes; None if sizes are unknown.

        Args:
            parts: those of a plan. Without sharded units, a distributed optimizer reduces and gathers once per
                iteration.
        """
        sizes, plan = costs.sizes_on(placement), next((part for part in parts if isinstance(part, ShardPlan)), None)
        if plan is not None or sizes is None:
            return (None, None) if plan is None else (plan.traffic, plan.static)
        ranks = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
        weights, gradients = sizes.sent(self.count)
        sent = tuple(sum(weights[stage] + gradients[stage] for stage in stages) for stages in ranks)
        return sent, tuple(sizes.whole(stages, self.count) for stages in ranks)


@dataclass(frozen=True)
class ShardPlan(Part):
    """The figures of a plan with sharded units.

    Attributes:
        timeline: that of the plan.
        sharding: how its chunks are sharded.
        replicas: the replicas over which they are.
        gathers, reductions: collectives per rank and iteration.
        traffic: bytes that a rank sends in them, which is also what it receives; None if sizes are unknown.
        static: bytes per rank of shards, and of weights and gradients that are whole at a time; None if unknown.
        activations: peak per rank, in the unit of the costs.
        lane_ms: ms that the collectives of a rank take, one after the other, on the rank where they take longest.
    """

    timeline: Timeline
    sharding: Sharding
    replicas: int
    gathers: tuple[int, ...]
    reductions: tuple[int, ...]
    traffic: tuple[float, ...] | None
    static: tuple[float, ...] | None
    activations: tuple[float, ...]
    lane_ms: float
    adds_ops = True
    suits_any_costs = True

    @property
    def held(self) -> tuple[float, ...] | None:
        """See ``Part``."""
        return self.static

    @property
    def peaks(self) -> tuple[float, ...]:
        """The peak per rank of activations, and of static memory where its size is known, in the unit of the costs."""
        static = self.static or (0.0,) * len(self.activations)
        return tuple(map(sum, zip(self.activations, static, strict=True)))

    def adding(self, added: Additions) -> Additions:
        """See ``Part``."""
        return replace(added, sharding=self.sharding)

    def on(self, timeline: Timeline, memory: PassMemory) -> ShardPlan:
        """See ``Part``."""
        return replace(self, timeline=timeline, activations=most_kept(timeline, memory))

    def recosted(self, costs: Figures, plan: Plan, timeline: Timeline) -> ShardPlan:
        """See ``Part``."""
        return figures_of(costs, plan, timeline, self.sharding, self.replicas)

    def content(self, costs: Figures) -> dict[str, Any]:
        """See ``Part``."""
        return {
            SHARD_WEIGHTS: True,
            "replicas": self.replicas,
            **sharding_content(self.sharding),
            "gathers": self.gathers,
            "reductions": self.reductions,
            "replica_traffic_bytes": self.traffic,
            "static_bytes": self.static,
            "collectives_ms": self.lane_ms,
            **dict(zip(("lower_bound_ms", "lower_bound_reason"), sharded_bound(self, costs), strict=True)),
        }


def replicas_of(setup: Setup, costs: Figures, memory_limit: str | None, count: int) -> Replicas | None:
    """The replicas that shard the weights of a setup, if any; its limit includes weights where their size is known."""
    if setup.shards is None:
        return None
    limit = activations = math.inf if memory_limit is None else costs.limit(memory_limit)
    if memory_limit is not None and costs.weights is not None and parse_memory_limit(memory_limit)[1] == "p":
        limit = math.inf  # a limit in microbatches is one of activations
    whole = setup.shards.whole_stages
    if whole is None:
        whole = "auto" if costs.weights is not None and limit < math.inf else DEFAULT_OPEN_CHUNKS
    return Replicas(count, setup.unit, None if whole == "auto" else whole, limit, activations)


def of_schedule(costs: Figures, schedule: Schedule, sharding: Sharding, replicas: int) -> ShardPlan:
    """Shard a schedule, prove the result without messages, and simulate it.

    Raises:
        UserError: a schedule with one stage per rank.
    """
    plan = lowered(schedule, sharding)
    prove(plan)
    timeline = simulate(plan, *costs.on(schedule.placement))
    return figures_of(costs, plan, timeline, sharding, replicas)


def figures_of(costs: Figures, plan: Plan, timeline: Timeline, sharding: Sharding, replicas: int) -> ShardPlan:
    """The figures of a sharded plan, which takes this time."""
    placement = plan.schedule.placement
    times, memory = costs.on(placement)
    sizes = costs.sizes_on(placement)
    return ShardPlan(
        timeline,
        sharding,
        replicas,
        tuple(sum(isinstance(op, Gather) for op in row) for row in plan.ops),
        tuple(sum(isinstance(op, Reduce) for op in row) for row in plan.ops),
        None if sizes is None else tuple(traffic(row, sizes, replicas) for row in plan.ops),
        None if sizes is None else static_bytes(plan, sizes, replicas),
        most_kept(timeline, memory),
        lane_ms(plan, times),
    )


def lowered(schedule: Schedule, sharding: Sharding) -> Plan:
    """Shard a schedule, without messages and without a proof.

    Raises:
        UserError: a schedule with one stage per rank.
    """
    check_chunks(schedule.placement)
    return plan_without_messages(schedule, Additions(sharding=sharding))


def lane_ms(plan: Plan, times: PassCosts) -> float:
    """What the collectives of a rank take, one after the other, on the rank where they take longest."""
    return max(sum(_lane_ms(op, times) for op in row) for row in plan.ops)


def least_ms(times: PassCosts, placement: Placement, passes_ms: float) -> tuple[float, str]:
    """A lower bound on an iteration with any units and any number of whole stages, and its reason.

    Every stage is gathered and reduced at least once. No pass starts before the first stage is whole, and the stage of
    the last pass is reduced after it.

    Args:
        passes_ms: a lower bound on the makespan of the passes.
    """
    around = times.gather(0) + passes_ms + min(map(times.reduce, range(placement.num_stages)))
    stages = map(placement.stages_of, range(placement.num_ranks))
    once = max(sum(times.gather(stage) + times.reduce(stage) for stage in own) for own in stages)
    if once > around:
        return once, "one gather and one reduction of every stage"
    return around, "the passes on this placement, the first gather and the last reduction"


def traffic(row: Sequence[Op], sizes: StageBytes, replicas: int) -> float:
    """Bytes that a rank sends per iteration: each collective leaves out the own part of what has other replicas."""
    return sum(traffic_bytes(row, *sizes.sent(replicas)))


def static_bytes(plan: Plan, sizes: StageBytes, replicas: int) -> tuple[float, ...]:
    """Bytes per rank: the shards, and the most of weights and gradients that are whole at a time."""
    placement = plan.schedule.placement
    return tuple(
        sizes.sharded(placement.stages_of(rank), replicas) + most_whole(row, *sizes.shared(replicas))
        for rank, row in enumerate(plan.ops)
    )


def with_collectives(
    costs: Figures, replicas: int, gather_ms: float | None, reduce_ms: float | None, bytes_per_ms: float | None
) -> Figures:
    """Return figures with the times of gathers and reductions: of all stages of a rank together, or by bandwidth.

    They have no bytes of whole weights, which no rank has.

    Raises:
        UserError: for a bandwidth when the size of the weights is unknown.
    """
    if bytes_per_ms is not None and costs.weights is None:
        raise UserError(
            "a bandwidth between replicas needs the size of the weights, which only --config gives; give --gather-ms "
            "and --reduce-ms instead"
        )
    by_size = None if bytes_per_ms is None else Bandwidth(bytes_per_ms, replicas)
    own = costs.giving(
        gather_ms=by_size if gather_ms is None else gather_ms, reduce_ms=by_size if reduce_ms is None else reduce_ms
    )
    return replace(own, counts_weights=False)


def costs_of_units(costs: Figures, schedule: Schedule, added: Additions, replicas: int, bytes_per_ms: float) -> Figures:
    """The costs of a job with what its plan adds: with sharded units, their collectives and their memory. Times come
    from the bandwidth where the size of the weights is known and times are not.
    """
    if added.sharding is None:
        return costs
    notes = []
    if costs.weights is not None and not any(costs.on(schedule.placement)[0].gather_ms):
        costs = with_collectives(costs, replicas, None, None, bytes_per_ms)
        notes.append(f"Gathers and reductions: bytes at {bytes_per_ms / 1e6:g} GB/s.")
    units = of_schedule(costs, schedule, added.sharding, replicas)
    sent = "" if units.traffic is None else f", {max(units.traffic) / 2**30:.3g} GiB sent to {replicas - 1} replicas"
    notes.append(
        f"Sharded units, {added.sharding.open_chunks} whole stages per rank: {max(units.gathers)} gathers and "
        f"{max(units.reductions)} reductions per rank and iteration{sent}."
    )
    if not units.lane_ms:
        notes.append("Gathers and reductions are not in the times, unless the costs file has gather_ms and reduce_ms.")
    own = replace(costs, notes=(*costs.notes, *notes))
    if units.static is None or costs.weights is None:
        return own
    return replace(own, weights=PlannedWeights(units.static, costs.weights), counts_weights=True)


def how_held(setup: Setup) -> str:
    """What replicas hold of weights, gradients and optimizer, in words; "" where these are whole."""
    return "" if setup.shards is None else "are divided by the replicas, and what is whole at a time is added"


def sharded_bound(plan: ShardPlan, costs: Figures) -> tuple[float, str]:
    """Return a lower bound in ms on the makespan with units of any size, and its reason."""
    schedule = plan.timeline.schedule
    passes = bound(costs, Workload.of(schedule), SHORTEST)
    return least_ms(costs.on(schedule.placement)[0], schedule.placement, passes.value_ms)


def _lane_ms(op: Op, times: PassCosts) -> float:
    if isinstance(op, Gather):
        return times.gather(op.stage)
    return times.reduce(op.stage) if isinstance(op, Reduce) else 0.0

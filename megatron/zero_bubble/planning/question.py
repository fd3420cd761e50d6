"""What is asked of the planner: costs and sizes, limits, and what it may choose."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import gt

from megatron.zero_bubble.core.analysis.score import within
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.ir import Placement, Schedule, Slices
from megatron.zero_bubble.core.ir.vocabulary import algorithm_of
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.core.schedules import recipe
from megatron.zero_bubble.core.search.placements import Placements
from megatron.zero_bubble.planning.cuts import Cuts, slices_of
from megatron.zero_bubble.planning.feasibility import Feasibility
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.offload import NO_LIMITS, HostLimits
from megatron.zero_bubble.planning.plans import ADAPTING, peak_memory
from megatron.zero_bubble.planning.setup import DEFAULT_LIMIT, Searched, Setup
from megatron.zero_bubble.planning.shards import Replicas
from megatron.zero_bubble.planning.source import ZB_AUTO, ScheduleSource
from megatron.zero_bubble.planning.vocabulary import Variant

_DIGITS = 1e4
"""A limit in units of 1F1B's peak is rounded to so many parts, so that a command with it asks for the same plan."""


@dataclass(frozen=True)
class Offloading:
    """What may move to host memory.

    Attributes:
        choice: as in ``plan_offload``.
        limits: the memory limits to make schedules for, of which one is taken after offloading, in the unit of the
            costs; None for no limit.
        limit: the device memory that the moves are to meet, in the unit of the costs; None for the least peak.
        host_ms, bytes_per_ms: the time of a copy, as in ``Figures.with_copies``; None for that of the costs.
    """

    choice: str
    limits: tuple[float | None, ...]
    limit: float | None
    host: HostLimits = NO_LIMITS
    host_ms: float | None = None
    bytes_per_ms: float | None = None

    def on(self, costs: Figures) -> Figures:
        """The figures with the time of copies."""
        is_given = self.host_ms is not None or self.bytes_per_ms is not None
        return costs.with_copies(self.host_ms, self.bytes_per_ms) if is_given else costs


@dataclass(frozen=True)
class Question:
    """What is asked. A field with several values leaves the choice among them to the planner.

    Attributes:
        costs: costs, pipeline ranks and microbatches; where the layout is chosen, ``Figures.evenly``.
        schedule: ``zb-auto`` to search, the name of a schedule, or None for that of ``file``.
        limit: memory limit per rank, in the unit of the costs; None for no limit. A search needs one.
        placement: that of a search, or those to choose from.
        num_chunks: stages per rank of an interleaved schedule; None for its default.
        unit: microbatches of a unit of a schedule of units; None for the best.
        slices: how to cut sequences, or the cuts to choose from; None for whole sequences, or a schedule's default.
        variants: vocabulary parallelism, with its costs; empty for none.
        offload: what may move to host memory; None for nothing.
        shards: the replicas that shard weights; None for whole weights.
        by_cost: whether the layers per stage are chosen together with the schedule.
        fits: whether a schedule for equal passes is refitted to the costs.
        starts: schedules of the variant that are known already, none of which may be better than the answer.
        recompute_logits: whether a divided output layer computes the logits again, which ``variants`` account for.
        known: whether a search also offers schedules that may be better once activations move to host memory.
        pairs: whether the all-to-all of experts runs beneath computation: in pairs of a forward and a backward if the
            schedule has them, else beneath weight gradients.
        ends: whether a search ends at a lower bound; for a schedule to which nothing is added (``adds_nothing``).
        effort: of a search for a schedule, as a share of the default.
        runs: what the answer must run on; None for any answer.
        instead: schedules that the answer is not worse than where ``runs`` refuses the best of a search.
    """

    costs: Figures
    schedule: str | None = ZB_AUTO
    limit: float | None = None
    objective: Metric = "span"
    file: Schedule | None = None
    placement: Placements = "auto"
    num_chunks: tuple[int | None, ...] = (None,)
    unit: int | None = None
    slices: Cuts | tuple[Slices, ...] | None = None
    variants: tuple[Variant, ...] = ()
    offload: Offloading | None = None
    shards: Replicas | None = None
    by_cost: bool = False
    fits: bool = True
    starts: tuple[Schedule, ...] = ()
    recompute_logits: bool = False
    known: bool = False
    pairs: bool = False
    ends: bool = False
    effort: float = 1.0
    runs: Feasibility | None = None
    instead: tuple[Schedule, ...] = ()

    @property
    def adds_nothing(self) -> bool:
        """Whether the answer is the schedule that a search finds, without passes or ops that are inserted later."""
        return not (self.variants or self.offload or self.shards or self.by_cost or self.pairs or self.known)

    @property
    def adapts(self) -> bool:
        """Whether the schedule is refitted to the costs."""
        return self.fits and self.schedule in ADAPTING

    @property
    def searches(self) -> bool:
        """Whether the answer needs a search, which takes seconds."""
        return self.by_cost or self.schedule == ZB_AUTO or self.adapts or self.shards is not None

    @property
    def has_units(self) -> bool:
        """Whether the schedule has units of microbatches."""
        return self.schedule not in (None, ZB_AUTO) and recipe(str(self.schedule)).has_units


def of_run(costs: Figures, setup: Setup, runs: Feasibility | None = None) -> Question:
    """What a run of ``zb-auto`` asks.

    The default limit is at least the peak of the schedule that the run begins with. With vocabulary parallelism, the
    answer is not worse than that schedule; so it is where the run could not run what a search finds.

    Args:
        costs: with vocabulary parallelism, with the times of its passes.
        runs: what the run has for its plans; None to ask for any plan.
    """
    assert isinstance(setup.order, Searched), "only a search asks during a run"
    first = _first(costs, setup, runs)
    limit = costs.limit(_raised(setup.order.limit or DEFAULT_LIMIT, costs, first))
    slices = slices_of(setup.cuts)
    asked = Question(
        costs,
        ZB_AUTO,
        limit,
        setup.objective,
        placement=(first.placement,),
        slices=(slices,) if slices is not None and len(slices) > 1 else None,
        runs=runs,
        instead=(first,),
    )
    if (algorithm := algorithm_of(first)) is None:
        return asked
    named = replace(first, name=f"{ZB_AUTO} (vocabulary {algorithm})")
    return replace(asked, variants=(Variant(algorithm, costs),), starts=(named,), instead=())


def _first(costs: Figures, setup: Setup, runs: Feasibility | None) -> Schedule:
    """The schedule that a run begins with."""
    memory = costs.on(Placement.linear(costs.num_ranks))[1]
    grows = any(map(gt, memory.wgrad, memory.activation))
    messages = replace(setup.messages, receives=(runs or Feasibility()).post_receives)
    begun = replace(setup.unmeasured, messages=messages)
    return ScheduleSource.of(begun, costs.num_ranks, fused=grows).make(costs.num_microbatches)


def _raised(memory_limit: str, costs: Figures, first: Schedule) -> str:
    """The default limit, but at least the peak of the first schedule; another limit as it is."""
    peak = peak_memory(timeline_of(first, *costs.on(first.placement)), costs)
    if memory_limit != DEFAULT_LIMIT or within(peak, costs.limit(DEFAULT_LIMIT)):
        return memory_limit
    return f"{math.ceil(peak / costs.peak_of_1f1b * _DIGITS) / _DIGITS:.10g}p"

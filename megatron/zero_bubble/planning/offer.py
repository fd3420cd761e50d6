"""An offer: one plan among those that the planner chooses from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.ir import Plan, Schedule
from megatron.zero_bubble.core.plan import Additions
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.layout_plan import LayoutPlan
from megatron.zero_bubble.planning.offload import OffloadPlan
from megatron.zero_bubble.planning.plans import peak_memory
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.score import DroppedVariant, Score
from megatron.zero_bubble.planning.shards import ShardPlan, figures_of, lowered


@dataclass(frozen=True)
class Offer:
    """A schedule with its costs, and what was chosen together with it.

    Attributes:
        layouts: the layers per stage, and the layouts that they are compared with; None if they were given.
        offloaded: what moves to host memory; None if nothing may move.
        shards: the sharded units; None for whole weights.
        simulated: the timeline of its plan, where it is known.
    """

    schedule: Schedule
    costs: Figures
    layouts: LayoutPlan | None = None
    offloaded: OffloadPlan | None = None
    shards: ShardPlan | None = None
    simulated: Timeline | None = None

    @property
    def added(self) -> Additions:
        """What its plan has in addition to the passes."""
        moves = () if self.offloaded is None else self.offloaded.moves
        return Additions(moves=moves, sharding=None if self.shards is None else self.shards.sharding)

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of its plan: with the copies, and the collectives of sharded units."""
        if self.simulated is not None:
            return self.simulated
        return timeline_of(self.schedule, *self.costs.on(self.schedule.placement), self.added)

    @property
    def known_timeline(self) -> Timeline | None:
        """The timeline, if it was simulated already, as that of one of several offers."""
        return self.simulated if self.simulated is not None else vars(self).get("timeline")

    @property
    def is_plain(self) -> bool:
        """Whether its plan is its schedule, without copies and collectives."""
        return self.offloaded is None and self.shards is None

    @property
    def untimed(self) -> Offer:
        """The same without its timeline, which is large, and without the layouts that it was compared with."""
        return replace(self, layouts=None, simulated=None)

    @property
    def static(self) -> tuple[float, ...] | None:
        """Bytes per rank of shards, and of weights and gradients that are whole at a time; None without, or unknown."""
        return None if self.shards is None else self.shards.static

    def with_costs(self, costs: Figures, plan: Plan | None = None) -> Offer:
        """The same schedule and units with other costs, without what moves.

        Args:
            plan: what is simulated; None to lower the schedule for it.
        """
        if self.shards is None:
            timeline = None if plan is None else simulate(plan, *costs.on(self.schedule.placement))
            return Offer(self.schedule, costs, simulated=timeline)
        sharding, replicas = self.shards.sharding, self.shards.replicas
        units = figures_of(costs, plan or lowered(self.schedule, sharding), sharding, replicas)
        return Offer(self.schedule, costs, shards=units, simulated=units.timeline)


Ask = Callable[[Question], Iterable[Offer | DroppedVariant]]
"""Answers a question in which one more field is decided."""
Chooser = Callable[[Question, Ask], Iterable[Offer | DroppedVariant]]
"""Chooses one field: asks with each of its values, and passes on what is offered, or the best of it."""


def score(question: Question, offer: Offer) -> Score:
    """How good an offer is. Of plans with offloading that are equally long, the one with the lowest peak is better."""
    peak = peak_memory(offer.timeline, offer.costs) if question.limit is not None or offer.offloaded else 0.0
    if question.replicas is not None and question.replicas.counts_weights:
        peak += max(offer.static or (0.0,))
    value = question.goal.value(offer.timeline, peak)
    return value if offer.offloaded is None else (*value, peak)

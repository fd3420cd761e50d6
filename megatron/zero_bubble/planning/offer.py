"""An offer: one plan among those that the planner chooses from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TypeVar

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.ir import Plan, Schedule
from megatron.zero_bubble.core.plan import NOTHING, Additions, plan_without_messages
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.offload import OffloadPlan
from megatron.zero_bubble.planning.part import Part
from megatron.zero_bubble.planning.plans import peak_memory
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.score import DroppedVariant, Score

Chosen = TypeVar("Chosen", bound=Part)


@dataclass(frozen=True)
class Offer:
    """A schedule with its costs, and what was chosen together with it.

    Attributes:
        parts: what was chosen besides the order, such as what moves to host memory, the last choice first.
        simulated: the timeline of its plan, where it is known.
    """

    schedule: Schedule
    costs: Figures
    parts: tuple[Part, ...] = ()
    simulated: Timeline | None = None

    def part(self, kind: type[Chosen]) -> Chosen | None:
        """The choice of a kind; None if it was not open."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def added(self) -> Additions:
        """What its plan has in addition to the passes."""
        return reduce(lambda added, part: part.adding(added), self.parts, NOTHING)

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
        return not any(part.adds_ops for part in self.parts)

    @property
    def untimed(self) -> Offer:
        """The same without its timeline, which is large, and without the layouts that it was compared with."""
        return replace(self, parts=tuple(part for part in self.parts if part.adds_ops), simulated=None)

    @property
    def static(self) -> tuple[float, ...] | None:
        """Bytes per rank that its choices take besides activations; None if there are none, or they are unknown."""
        return next((part.held for part in self.parts if part.held is not None), None)

    def with_costs(self, costs: Figures, plan: Plan | None = None) -> Offer:
        """The same schedule with other costs, and what was chosen whatever these are.

        Args:
            plan: what is simulated; None to lower the schedule for it.
        """
        own = Offer(self.schedule, costs, tuple(part for part in self.parts if part.suits_any_costs))
        if plan is None and own.parts:
            plan = plan_without_messages(self.schedule, own.added)
        if plan is None:
            return own
        timeline = simulate(plan, *costs.on(self.schedule.placement))
        parts = tuple(part.recosted(costs, plan, timeline) for part in own.parts)
        return replace(own, parts=parts, simulated=timeline)

    def choosing(self, part: Part, timeline: Timeline) -> Offer:
        """The same with one more choice, and the timeline of its plan."""
        return replace(self, parts=(part, *self.parts), simulated=timeline)


Ask = Callable[[Question], Iterable[Offer | DroppedVariant]]
"""Answers a question in which one more field is decided."""
Chooser = Callable[[Question, Ask], Iterable[Offer | DroppedVariant]]
"""Chooses one field: asks with each of its values, and passes on what is offered, or the best of it."""


def score(question: Question, offer: Offer) -> Score:
    """How good an offer is. Of plans with offloading that are equally long, the one with the lowest peak is better."""
    moves = offer.part(OffloadPlan) is not None
    peak = peak_memory(offer.timeline, offer.costs) if question.limit is not None or moves else 0.0
    if question.replicas is not None and question.replicas.counts_weights:
        peak += max(offer.static or (0.0,))
    value = question.goal.value(offer.timeline, peak)
    return (*value, peak) if moves else value

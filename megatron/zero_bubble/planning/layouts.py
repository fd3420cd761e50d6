"""Plan which layers go on which stage, together with the schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatron.zero_bubble.core.analysis.bounds import least_memory
from megatron.zero_bubble.core.analysis.score import ROUNDING, is_less, within
from megatron.zero_bubble.core.costs.layers import LayerCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout import layout_text
from megatron.zero_bubble.core.ir import Placement, Plan
from megatron.zero_bubble.core.ir.schedule import chain_of
from megatron.zero_bubble.core.plan import plan_without_messages
from megatron.zero_bubble.core.search.cut import cut, least_layers
from megatron.zero_bubble.core.search.layout import Layout, LayoutTrials, best_layout
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.layout_plan import EVEN, MOVED, Baseline, LayoutPlan, RatedLayout
from megatron.zero_bubble.planning.offer import Ask, Offer, score
from megatron.zero_bubble.planning.plans import quick_bound
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.score import DroppedVariant, attempt, best
from megatron.zero_bubble.planning.setup import Named, Searched

_MOST_ROUNDS = 3
"""How often a schedule is made again for the best layout, and the best layout found again for that schedule."""
_LITTLE = 0.03
"""Effort of the search for a draft."""
_EFFORT_BESIDES_SEARCH = 0.1
"""How much effort goes into the layout for a draft, relative to that for a known schedule."""
_CLOSE = 1.01
"""Up to this factor above the best, a layout on another placement is improved, and a draft is followed by a search."""
_NEAR_THE_BOUND = 2e-3
"""A search that cannot make the best plan shorter by more than this share is left out."""


@dataclass(frozen=True)
class _LaidOut(RatedLayout):
    """A layout with the best offer for it."""

    offer: Offer


def lay_out(question: Question, placements: Sequence[Placement], ask: Ask) -> Offer:
    """Find the layout, the placement among ``placements`` and the plan with the best score.

    The result is never longer than the even split, or than that with layers moved away from the last stage. If no
    layout is within the limit, it is planned without one. Where schedules are searched for, layouts are compared by
    drafts, and schedules are made for the best and for those that are about as good.

    Args:
        question: on the costs of the even split, ``Figures.evenly``, with the algorithm of its vocabulary.
        ask: answers it for one layout.

    Raises:
        UserError: for too few layers, or when no layout has a schedule.
    """
    return _laid_out(question, question, placements, ask)


def _laid_out(question: Question, rated: Question, placements: Sequence[Placement], ask: Ask) -> Offer:
    """``lay_out``, where answers to ``question`` are compared as answers to ``rated``."""
    desks: list[tuple[_Desk, dict[str, Layout]]] = []
    options: dict[tuple[_Desk, Layout], _LaidOut] = {}
    dropped: list[DroppedVariant] = []
    # First two stages per rank: mostly, their schedules are the shortest.
    for on in sorted(placements, key=lambda placement: -placement.num_stages):
        desk = _Desk(question, rated, on, ask, dropped)
        for planned in attempt(f"{on.num_stages} stages", partial(desk.plan, list(options.values()))):
            if isinstance(planned, DroppedVariant):
                dropped.append(planned)
                continue
            known, found = planned
            desks.append((desk, known))
            for option in found:
                key = desk, option.layout
                options[key] = _first((options.get(key, option), option))
    if not options:
        raise UserError(dropped[0].reason)
    if searches_drafts(question):
        options = _finished(options)
    chosen = _first(options.values())
    if chosen.excess:
        return _laid_out(question, _without_limit(rated), placements, ask)
    others: dict[str, Baseline] = {}
    for desk, known in desks:
        for name, layout in known.items():
            if (baseline := desk.baseline(layout, options.get((desk, layout)), chosen)) is not None:
                others[name] = min(others.get(name, baseline), baseline, key=lambda one: one.value)
    plan = LayoutPlan(RatedLayout(chosen.layout, chosen.value, chosen.predictions), others, tuple(dropped))
    return chosen.offer.choosing(plan, chosen.offer.timeline)


def searches_drafts(question: Question) -> bool:
    """Whether schedules of whole sequences are searched for, which takes long, and have a lower bound, as those with
    pairs do not. A schedule for equal passes is no draft of one whose passes of the vocabulary are inserted after it
    was refitted.
    """
    fits = question.adapts and not question.setup.inserts
    return question.setup.cuts is None and not question.setup.pairs and (question.is_search or fits)


def _draft(question: Question) -> Question:
    order, little = question.setup.order, replace(question, effort=_LITTLE)
    return little.deciding(order=replace(order, equal_passes=True)) if isinstance(order, Named) else little


def _without_limit(question: Question) -> Question:
    replicas = None if question.replicas is None else question.replicas.within(None)
    return replace(question, limit=None, replicas=replicas)


def shifted_layers(layers: LayerCosts, placement: Placement, layout: Layout) -> Layout:
    """Move layers from the last stage, one to every stage before it in turn, until its rank is as busy as the others.

    This is the baseline that the authors of Vocabulary Parallelism (arXiv 2411.05288, section 6) compare with: the time
    of the rank with the loss is as near as possible to the largest of the others.
    """
    least, last = least_layers(placement), placement.num_stages - 1
    rank_of_loss = placement.stage_to_rank[last]
    candidates = [layout]
    while candidates[-1][last] > least[last] and last:
        other = list(candidates[-1])
        other[last] -= 1
        other[last - 1 - (len(candidates) - 1) % last] += 1
        candidates.append(tuple(other))

    def difference(candidate: Layout) -> float:
        work = layers.rank_work_ms(placement, candidate)
        others = [ms for rank, ms in enumerate(work) if rank != rank_of_loss]
        return abs(work[rank_of_loss] - max(others, default=work[rank_of_loss]))

    return min(candidates, key=difference)


@dataclass(frozen=True, eq=False)
class _Desk:
    """What layouts on one placement are made from and compared by."""

    question: Question
    rated: Question
    placement: Placement
    ask: Ask
    dropped: list[DroppedVariant]
    bounds: dict[Layout, float] = field(default_factory=dict)

    @property
    def layers(self) -> LayerCosts:
        """The costs of the layers."""
        assert self.question.costs.layers is not None, "these are costs of Figures.evenly"
        return self.question.costs.layers

    @property
    def drafts(self) -> bool:
        """Whether layouts are compared by drafts."""
        return searches_drafts(self.question)

    def plan(self, before: Sequence[_LaidOut]) -> Iterator[tuple[dict[str, Layout], list[_LaidOut]]]:
        """Yield the baselines by name, and plans for layouts on this placement; nothing if no layout has a schedule.

        With a search, they are drafts, and only of layouts that may be shorter than those ``before``.
        """
        layers = self.layers
        evenly = self.question.costs.layout(self.placement)
        known = {EVEN: evenly}
        if not layers.is_divided:
            known[MOVED] = shifted_layers(layers, self.placement, evenly)
        least_work = cut(self.placement, layers.work_ms, layers.embedding.work_ms, layers.loss.work_ms)
        starts = tuple(dict.fromkeys((least_work, *known.values())))
        if self.drafts and self.busiest(least_work) >= min(map(self.busiest, known.values())) * (1 - ROUNDING):
            starts = tuple(dict.fromkeys(known.values()))
        options: list[_LaidOut] = []
        others = len(self.dropped)
        for layout in starts:
            if self.bound(layout) < _shortest((*before, *options)) * (1 - ROUNDING):
                options += self.drafted(layout)
        if len(self.dropped) > others and not options:
            return
        if options and (not self.drafts or _first(options).ms <= _CLOSE * _shortest(before)):
            options += self.improved(_first(options), starts)
        yield known, options

    def improved(self, chosen: _LaidOut, starts: tuple[Layout, ...]) -> Iterator[_LaidOut]:
        """Alternate between the best layout for a schedule and the best schedule for a layout, while this helps."""
        for _ in range(_MOST_ROUNDS):
            trials = self.trials(chosen.offer)
            layout = best_layout(trials, self.layers.num_layers, (chosen.layout, *(() if self.drafts else starts)))
            if layout == chosen.layout:
                return
            chosen = self.moved(layout, chosen.offer)
            yield chosen
            again = self.drafted(layout)
            if not again or not is_less(again[0].value, chosen.value):
                return
            chosen = again[0]
            yield chosen

    def trials(self, offer: Offer) -> LayoutTrials:
        """Rate other layouts for an offer; by its whole plan, if that is more than the passes of its stages."""
        how = self.layers, offer.schedule, self.rated.goal
        if offer.is_plain and offer.schedule.make_flow is chain_of and not offer.schedule.overlaps:
            return LayoutTrials(*how, _EFFORT_BESIDES_SEARCH if self.drafts else 1.0)

        plan = plan_without_messages(offer.schedule, offer.added)

        def rated(layout: Layout) -> tuple[float, float]:
            excess, ms = self.moved(layout, offer, plan).value
            return excess, ms

        return LayoutTrials(*how, rated=rated)

    def baseline(self, layout: Layout, option: _LaidOut | None, chosen: _LaidOut) -> Baseline | None:
        """Return a baseline from its plan, if there is one; None if it has none, or the limit admits none."""
        bound = self.bound(layout)
        if option is not chosen and bound >= chosen.ms * (1 - ROUNDING):
            return Baseline(layout, (0.0, bound), self.layers.predictions, is_bound=True)
        return None if option is None else Baseline(layout, option.value, self.layers.predictions)

    def busiest(self, layout: Layout) -> float:
        """The work of the busiest rank per microbatch, in ms."""
        return max(self.layers.rank_work_ms(self.placement, layout))

    def bound(self, layout: Layout) -> float:
        """A lower bound in ms on the schedules of a layout; -1 if it is not known, or the limit admits no schedule."""
        if layout not in self.bounds:
            self.bounds[layout] = -1.0
            if self.drafts:
                costs, goal = self.costs(layout), self.rated.goal
                if within(max(least_memory(costs.on(self.placement)[1], self.placement, fused=True)), goal.limit):
                    work = self.question.setup.work(self.placement, costs.num_microbatches)
                    self.bounds[layout] = quick_bound(costs, work, goal)
        return self.bounds[layout]

    def drafted(self, layout: Layout) -> list[_LaidOut]:
        """Make a plan for a layout, with little effort if it is searched for; none if the limit admits none."""
        question = _draft(self.question) if self.drafts else self.question
        name = f"the layout {layout_text(layout, self.layers.predictions)}"
        found = [*attempt(name, lambda: [self.made(layout, question)])]
        self.dropped.extend(each for each in found if isinstance(each, DroppedVariant))
        return [each for each in found if not isinstance(each, DroppedVariant)]

    def made(self, layout: Layout, question: Question) -> _LaidOut:
        """Ask for a plan with a layout."""
        costs = self.costs(layout)
        asked = replace(question, costs=costs)
        if asked.is_search:
            asked = asked.deciding(order=Searched.on(self.placement))
        return self.of_offer(layout, best(self.ask(asked), partial(score, asked)).offer)

    def moved(self, layout: Layout, offer: Offer, plan: Plan | None = None) -> _LaidOut:
        """The same schedule and units with another layout.

        Args:
            plan: what is simulated; None to lower the schedule for it.
        """
        return self.of_offer(layout, offer.with_costs(self.costs(layout), plan))

    def costs(self, layout: Layout) -> Figures:
        """The costs of a layout."""
        return self.question.costs.laid_out(self.placement, layout)

    def of_offer(self, layout: Layout, offer: Offer) -> _LaidOut:
        """Rate an offer."""
        return _LaidOut(layout, score(self.rated, offer), self.layers.predictions, offer)


def _finished(drafts: Mapping[tuple[_Desk, Layout], _LaidOut]) -> dict[tuple[_Desk, Layout], _LaidOut]:
    """Search with full effort for the best drafts, shortest first, as long as this may give the best plan."""
    made = dict(drafts)
    for (desk, layout), draft in sorted(drafts.items(), key=lambda item: item[1].value):
        shortest = _shortest(made.values())
        if draft.ms <= _CLOSE * shortest and desk.bound(layout) < shortest * (1 - _NEAR_THE_BOUND):
            made[desk, layout] = _first((draft, desk.made(layout, desk.question)))
    return made


def _shortest(plans: Iterable[_LaidOut]) -> float:
    """Return the shortest length in ms within the memory limit; infinity if there is none."""
    return min((plan.ms for plan in plans if not plan.excess), default=math.inf)


def _first(options: Iterable[_LaidOut]) -> _LaidOut:
    """Return the best option; of equals, the first."""
    found = list(options)
    chosen = found[0]
    for option in found[1:]:
        if is_less(option.value, chosen.value):
            chosen = option
    return chosen

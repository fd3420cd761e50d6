"""Plan which layers go on which stage, together with the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatron.zero_bubble.core.analysis.bounds import least_memory
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.score import ROUNDING, Goal, is_less, within
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs.layers import LayerCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout import layout_text
from megatron.zero_bubble.core.ir import Placement, Schedule
from megatron.zero_bubble.core.search.cut import cut, least_layers
from megatron.zero_bubble.core.search.layout import Layout, LayoutTrials, best_layout
from megatron.zero_bubble.core.search.timed import timed
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.score import DroppedVariant, attempt

_MOST_ROUNDS = 3
"""How often a schedule is made again for the best layout, and the best layout found again for that schedule."""
_EFFORT_BESIDES_SEARCH = 0.1
"""How much effort goes into the layout for a draft, relative to that for a known schedule."""
_CLOSE = 1.01
"""Up to this factor above the best, a layout on another placement is improved, and a draft is followed by a search."""
_NEAR_THE_BOUND = 2e-3
"""A search that cannot make the best plan shorter by more than this share is left out."""

EVEN, MOVED = "even split", "even split with layers moved from the last stage"
"""Names of the layouts that a plan is compared with."""


@dataclass(frozen=True)
class RatedLayout:
    """A layout and how good it is.

    Attributes:
        value: the peak memory if it is above the limit (else 0), in the unit of the costs, and the objective in ms; the
            smallest is the best.
    """

    layout: Layout
    value: tuple[float, float]

    @property
    def excess(self) -> float:
        """The peak memory if it is above the limit, else 0; in the unit of the costs."""
        return self.value[0]

    @property
    def ms(self) -> float:
        """The objective in ms: the makespan or the longest span."""
        return self.value[1]

    @property
    def text(self) -> str:
        """Megatron's ``--pipeline-model-parallel-layout``."""
        return layout_text(self.layout)


@dataclass(frozen=True)
class LayoutSchedule(RatedLayout):
    """A schedule with one layout; ``costs`` are those of the layout."""

    schedule: Schedule
    timeline: Timeline
    costs: Figures


@dataclass(frozen=True)
class Baseline(RatedLayout):
    """A layout that a plan is compared with.

    Attributes:
        is_bound: whether no schedule was made for it, because none is shorter than ``ms``, which is not below the plan.
    """

    is_bound: bool = False


@dataclass(frozen=True)
class LayoutPlan:
    """The best layout that was found, those that it is compared with, by name, and those without a schedule."""

    best: LayoutSchedule
    others: Mapping[str, Baseline]
    dropped: tuple[DroppedVariant, ...] = ()

    def gains(self) -> dict[str, float]:
        """Return how much shorter the plan makes an iteration at least, as a share of the time with other layouts."""
        return {name: 1 - self.best.ms / other.ms if other.ms else 0.0 for name, other in self.others.items()}


@dataclass(frozen=True)
class Search:
    """How to avoid searches for schedules, which take long, for layouts that do not become the best.

    Attributes:
        draft: as ``make`` of ``lay_out``, with little effort.
        least: a lower bound in ms on what ``make`` gives within a limit.
    """

    draft: Callable[[Figures, Placement], Schedule]
    least: Callable[[Figures, Placement, Goal], float]


def lay_out(
    costs: Figures,
    placements: Sequence[Placement],
    make: Callable[[Figures, Placement], Schedule],
    goal: Goal,
    search: Search | None = None,
) -> LayoutPlan:
    """Find the layout, the placement among ``placements`` and the schedule that are the best for a goal.

    The result is never longer than the even split, or than that with layers moved away from the last stage. If no
    layout is within the limit, it is planned without one.

    Args:
        costs: the costs of the even split, ``Figures.evenly``.
        make: builds a schedule on a placement, or searches for one, for the costs of one layout.
        search: if ``make`` searches: layouts are compared by drafts, and schedules are made for the best and for those
            that are about as good.

    Raises:
        UserError: for too few layers, or when no layout has a schedule.
    """
    assert costs.layers is not None, "these are costs of Figures.evenly"
    desks: list[tuple[_Desk, dict[str, Layout]]] = []
    options: dict[tuple[_Desk, Layout], LayoutSchedule] = {}
    dropped: list[DroppedVariant] = []
    # First two stages per rank: mostly, their schedules are the shortest.
    for on in sorted(placements, key=lambda placement: -placement.num_stages):
        desk = _Desk(costs, costs.layers, on, make, goal, search, dropped)
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
    if search is not None:
        options = _finished(options)
    best = _first(options.values())
    if best.excess:
        return lay_out(costs, placements, make, replace(goal, limit=None), search)
    others: dict[str, Baseline] = {}
    for desk, known in desks:
        for name, layout in known.items():
            if (baseline := desk.baseline(layout, options.get((desk, layout)), best)) is not None:
                others[name] = min(others.get(name, baseline), baseline, key=lambda one: one.value)
    return LayoutPlan(best, others, tuple(dropped))


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

    costs: Figures
    layers: LayerCosts
    placement: Placement
    make: Callable[[Figures, Placement], Schedule]
    goal: Goal
    search: Search | None
    dropped: list[DroppedVariant]
    bounds: dict[Layout, float] = field(default_factory=dict)

    def plan(self, before: Sequence[LayoutSchedule]) -> Iterator[tuple[dict[str, Layout], list[LayoutSchedule]]]:
        """Yield the baselines by name, and plans for layouts on this placement; nothing if no layout has a schedule.

        With a search, they are drafts, and only of layouts that may be shorter than those ``before``.
        """
        layers = self.layers
        evenly = self.costs.layout(self.placement)
        known = {EVEN: evenly, MOVED: shifted_layers(layers, self.placement, evenly)}
        least_work = cut(self.placement, layers.work_ms, layers.embedding.work_ms, layers.loss.work_ms)
        starts = tuple(dict.fromkeys((least_work, *known.values())))
        if self.search is not None and self.busiest(least_work) >= min(map(self.busiest, known.values())) * (
            1 - ROUNDING
        ):
            starts = tuple(dict.fromkeys(known.values()))
        options: list[LayoutSchedule] = []
        others = len(self.dropped)
        for layout in starts:
            if self.bound(layout) < _shortest((*before, *options)) * (1 - ROUNDING):
                options += self.drafted(layout)
        if len(self.dropped) > others and not options:
            return
        if options and (self.search is None or _first(options).ms <= _CLOSE * _shortest(before)):
            options += self.improved(_first(options), starts)
        yield known, options

    def improved(self, best: LayoutSchedule, starts: tuple[Layout, ...]) -> Iterator[LayoutSchedule]:
        """Alternate between the best layout for a schedule and the best schedule for a layout, while this helps."""
        effort, starts = (1.0, starts) if self.search is None else (_EFFORT_BESIDES_SEARCH, ())
        for _ in range(_MOST_ROUNDS):
            trials = LayoutTrials(self.layers, best.schedule, self.goal, effort)
            layout = best_layout(trials, self.layers.num_layers, (best.layout, *starts))
            if layout == best.layout:
                return
            best = self.laid_out(layout, best.schedule)
            yield best
            again = self.drafted(layout)
            if not again or not is_less(again[0].value, best.value):
                return
            best = again[0]
            yield best

    def baseline(self, layout: Layout, option: LayoutSchedule | None, best: LayoutSchedule) -> Baseline | None:
        """Return a baseline from its plan, if there is one; None if it has none, or the limit admits none."""
        bound = self.bound(layout)
        if option is not best and bound >= best.ms * (1 - ROUNDING):
            return Baseline(layout, (0.0, bound), is_bound=True)
        return None if option is None else Baseline(layout, option.value)

    def busiest(self, layout: Layout) -> float:
        """The work of the busiest rank per microbatch, in ms."""
        return max(self.layers.rank_work_ms(self.placement, layout))

    def bound(self, layout: Layout) -> float:
        """A lower bound in ms on the schedules of a layout; -1 if it is not known, or the limit admits no schedule."""
        if layout not in self.bounds:
            self.bounds[layout] = -1.0
            if self.search is not None:
                costs = self.costs.laid_out(self.placement, layout)
                least = least_memory(costs.on(self.placement)[1], self.placement, fused=True)
                if within(max(least), self.goal.limit):
                    self.bounds[layout] = self.search.least(costs, self.placement, self.goal)
        return self.bounds[layout]

    def drafted(self, layout: Layout) -> list[LayoutSchedule]:
        """Make a schedule for a layout, with little effort if it is searched for; none if the limit admits none."""
        make = self.make if self.search is None else self.search.draft
        found = [*attempt(f"the layout {layout_text(layout)}", lambda: [self.made(layout, make)])]
        self.dropped.extend(each for each in found if isinstance(each, DroppedVariant))
        return [each for each in found if not isinstance(each, DroppedVariant)]

    def made(self, layout: Layout, make: Callable[[Figures, Placement], Schedule]) -> LayoutSchedule:
        """Make a schedule for a layout."""
        return self.laid_out(layout, make(self.costs.laid_out(self.placement, layout), self.placement))

    def laid_out(self, layout: Layout, schedule: Schedule) -> LayoutSchedule:
        """Simulate a schedule with a layout."""
        costs = self.costs.laid_out(self.placement, layout)
        timeline = timed(schedule, *costs.on(self.placement))
        peak = max(most_kept(timeline, costs.on(self.placement)[1]))
        return LayoutSchedule(layout, self.goal.value(timeline, peak), schedule, timeline, costs)


def _finished(drafts: Mapping[tuple[_Desk, Layout], LayoutSchedule]) -> dict[tuple[_Desk, Layout], LayoutSchedule]:
    """Search with full effort for the best drafts, shortest first, as long as this may give the best plan."""
    made = dict(drafts)
    for (desk, layout), draft in sorted(drafts.items(), key=lambda item: item[1].value):
        shortest = _shortest(made.values())
        if draft.ms <= _CLOSE * shortest and desk.bound(layout) < shortest * (1 - _NEAR_THE_BOUND):
            made[desk, layout] = _first((draft, desk.made(layout, desk.make)))
    return made


def _shortest(plans: Iterable[LayoutSchedule]) -> float:
    """Return the shortest length in ms within the memory limit; infinity if there is none."""
    return min((plan.ms for plan in plans if not plan.excess), default=math.inf)


def _first(options: Iterable[LayoutSchedule]) -> LayoutSchedule:
    """Return the best option; of equals, the first."""
    found = list(options)
    best = found[0]
    for option in found[1:]:
        if is_less(option.value, best.value):
            best = option
    return best

"""Plan which layers go on which stage, together with the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron.zero_bubble.analysis.memory import most_kept
from megatron.zero_bubble.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.costs.layers import LayerCosts
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement, Schedule
from megatron.zero_bubble.job.layers import layout_text
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.search.cut import cut, even, is_less, least_layers
from megatron.zero_bubble.search.layout import Layout, Trial, best_layout
from megatron.zero_bubble.search.timed import timed

_MOST_ROUNDS = 3
"""How often a schedule is made again for the best layout, and the best layout found again for that schedule."""
_ROUNDING = 1e-9

EVEN, MOVED = "even split", "even split with layers moved from the last stage"
"""Names of the layouts that a plan is compared with."""
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class LaidOut:
    """A schedule with one layout.

    Attributes:
        costs: the costs of the layout.
        value: memory above the limit (0 if within it), and the objective in ms; the smallest is the best.
    """

    layout: Layout
    schedule: Schedule
    timeline: Timeline
    costs: Figures
    value: tuple[float, float]

    @property
    def excess(self) -> float:
        """The peak memory if it is above the limit, else 0."""
        return self.value[0]

    @property
    def ms(self) -> float:
        """The objective."""
        return self.value[1]

    @property
    def text(self) -> str:
        """Megatron's ``--pipeline-model-parallel-layout``."""
        return layout_text(self.layout)


@dataclass(frozen=True)
class LayoutPlan:
    """The best layout that was found, and those that it is compared with, by name."""

    best: LaidOut
    others: Mapping[str, LaidOut]

    def gains(self) -> dict[str, float]:
        """Return how much shorter the plan makes an iteration, as a share of the time with each other layout."""
        return {name: 1 - self.best.ms / other.ms if other.ms else 0.0 for name, other in self.others.items()}


def lay_out(
    costs: Figures,
    placements: Sequence[Placement],
    make: Callable[[Figures, Placement], Schedule],
    limit: float | None,
    objective: Metric,
) -> LayoutPlan:
    """Find the layout, the placement among ``placements`` and the schedule with the smallest ``objective``.

    The result is never longer than the even split, or than that with layers moved away from the last stage. If no
    layout is within the limit, it is planned without one.

    Args:
        costs: the costs of the even split, ``Figures.evenly``.
        make: builds a schedule on a placement, or searches for one, for the costs of one layout.
        limit: memory limit per rank, or None.

    Raises:
        UserError: for too few layers, or when no layout has a schedule.
    """
    assert costs.layers is not None, "these are costs of Figures.evenly"
    desks = [_Desk(costs, costs.layers, on, make, limit, objective) for on in placements]
    plans, missing = _those_that_exist(desks, _Desk.plan)
    if not plans:
        raise missing[0]
    names = dict.fromkeys(name for plan in plans for name in plan.others)
    others = {name: _first(plan.others[name] for plan in plans if name in plan.others) for name in names}
    best = _first(plan.best for plan in plans)
    return lay_out(costs, placements, make, None, objective) if best.excess else LayoutPlan(best, others)


def moved(layers: LayerCosts, placement: Placement, layout: Layout) -> Layout:
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


@dataclass(frozen=True)
class _Desk:
    """What layouts on one placement are made from and compared by."""

    costs: Figures
    layers: LayerCosts
    placement: Placement
    make: Callable[[Figures, Placement], Schedule]
    limit: float | None
    objective: Metric

    def plan(self) -> LayoutPlan:
        """Alternate between the best layout for a schedule and the best schedule for a layout."""
        layers = self.layers
        evenly = even(self.placement, layers.num_layers)
        known = {EVEN: evenly, MOVED: moved(layers, self.placement, evenly)}
        least_work = cut(self.placement, layers.work_ms, layers.embedding.work_ms, layers.loss.work_ms)
        starts = tuple(dict.fromkeys((*known.values(), least_work)))
        options, missing = _those_that_exist(starts, self.made)
        if not options:
            raise missing[0]
        best = _first(options)
        for _ in range(_MOST_ROUNDS):
            trial = Trial(layers, best.schedule, self.limit, self.objective)
            layout = best_layout(trial, layers.num_layers, (best.layout, *starts))
            if layout == best.layout:
                break
            best = self.laid_out(layout, best.schedule)
            again, _missing = _those_that_exist((layout,), self.made)
            if not again or not is_less(again[0].value, best.value):
                break
            best = again[0]
        by_layout = {option.layout: option for option in options}
        return LayoutPlan(best, {name: by_layout[layout] for name, layout in known.items() if layout in by_layout})

    def made(self, layout: Layout) -> LaidOut:
        """Make a schedule for a layout."""
        return self.laid_out(layout, self.make(self.costs.laid_out(self.placement, layout), self.placement))

    def laid_out(self, layout: Layout, schedule: Schedule) -> LaidOut:
        """Simulate a schedule with a layout."""
        costs = self.costs.laid_out(self.placement, layout)
        timeline = timed(schedule, *costs.on(self.placement))
        peak = max(most_kept(timeline, costs.on(self.placement)[1]))
        over = self.limit is not None and peak > self.limit * (1 + _ROUNDING)
        ms = timeline.makespan_ms if self.objective == "makespan" else timeline.span_ms
        return LaidOut(layout, schedule, timeline, costs, (peak if over else 0.0, ms))


def _those_that_exist(of: Iterable[S], make: Callable[[S], T]) -> tuple[list[T], list[UserError]]:
    """Return the results of ``make``, and its errors: a limit may admit no schedule for some of the arguments."""
    made, missing = [], []
    for each in of:
        try:
            made.append(make(each))
        except UserError as error:
            missing.append(error)
    return made, missing


def _first(options: Iterable[LaidOut]) -> LaidOut:
    """Return the best option; of equals, the first."""
    found = list(options)
    best = found[0]
    for option in found[1:]:
        if is_less(option.value, best.value):
            best = option
    return best

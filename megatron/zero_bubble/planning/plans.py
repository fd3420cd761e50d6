"""Plans: schedules on the clock, with the figures and the limit that they were made for."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.analysis.bounds import Bound, lower_bound
from megatron.zero_bubble.analysis.memory import most_kept
from megatron.zero_bubble.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.formats.plan import Certificate
from megatron.zero_bubble.ir import Placement, Schedule
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.schedules import SCHEDULES
from megatron.zero_bubble.search.auto import PlacementChoice, fit, zb_auto

ADAPTING = [recipe.name for recipe in SCHEDULES.values() if recipe.adapts]


@dataclass(frozen=True)
class PlannedSchedule:
    """A schedule on the clock, the figures that it was planned with, and how good it is where a limit was given."""

    timeline: Timeline
    costs: Figures
    certificate: Certificate | None


def auto(costs: Figures, limit: float, placement: PlacementChoice, objective: Metric) -> Schedule:
    """What ``zb_auto`` finds; for a V, or for the better of both placements, from the figures of every half rank."""
    finest = Placement.linear(costs.num_ranks) if placement == "linear" else Placement.vee(costs.num_ranks)
    sizes = costs.num_ranks, costs.num_microbatches
    return zb_auto(*costs.on(finest), *sizes, limit, placement=placement, objective=objective)


def bound(costs: Figures, placement: Placement, limit: float, objective: Metric) -> Bound:
    """The lower bound on one placement."""
    return lower_bound(*costs.on(placement), placement, costs.num_microbatches, limit, objective)


def fitted(schedule: Schedule, costs: Figures, objective: Metric) -> Schedule:
    """A schedule that was made for equal passes, made anew for these costs (``fit``). Other schedules as they are."""
    if schedule.name not in ADAPTING:
        return schedule
    return fit(schedule, *costs.on(schedule.placement), objective=objective)


def limit_verdict(timeline: Timeline, costs: Figures, certificate: Certificate) -> tuple[bool, str]:
    """Whether the limit is kept, and the sentence that says so."""
    peak = peak_memory(timeline, costs)
    kept = peak <= certificate.memory_limit * (1 + 1e-9)
    verdict = "kept" if kept else f"EXCEEDED by {timeline.schedule.name}"
    limit = costs.show(certificate.memory_limit)
    return kept, f"memory limit {limit}: {verdict}, at most {costs.show(peak)} on a rank"


def peak_memory(timeline: Timeline, costs: Figures) -> float:
    """The most that any rank keeps, in the unit of memory."""
    return max(rank_memory(timeline, costs))


def rank_memory(timeline: Timeline, costs: Figures) -> tuple[float, ...]:
    """The most that every rank keeps, in the unit of memory."""
    return most_kept(timeline, costs.on(timeline.schedule.placement)[1])

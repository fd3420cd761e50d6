"""Make plans: simulated schedules, with the figures and the memory limit that they were made for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megatron.zero_bubble.core.analysis.bounds import Bound, lower_bound, lower_bound_with_offload
from megatron.zero_bubble.core.analysis.memory import message_peaks, most_kept
from megatron.zero_bubble.core.analysis.score import Goal, length_ms, within
from megatron.zero_bubble.core.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.core.ir import Plan, Schedule
from megatron.zero_bubble.core.ir.sizes import check_size
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.plan import Additions, PostReceives, unproved_plan_of
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.core.schedules import SCHEDULES
from megatron.zero_bubble.core.search.auto import fit, zb_auto
from megatron.zero_bubble.core.search.placements import Placements, placements
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.unit_sizes import best_within

_ALIKE = 0.005
"""Relative difference between two amounts of memory up to which they count as equal."""
ADAPTING = [recipe.name for recipe in SCHEDULES.values() if recipe.adapts]


def auto(
    costs: Figures,
    placement: Placements,
    goal: Goal,
    effort: float = 1.0,
    ends: bool = False,
) -> Schedule:
    """Search with ``zb_auto`` on a placement, or on the best of several, each with its own figures."""
    choices = placements(placement, costs.num_ranks)
    finest = max(choices, key=lambda on: on.num_stages)
    sizes = costs.num_ranks, costs.num_microbatches
    check_size(*sizes, finest.num_stages // finest.num_ranks)
    on = costs.on(finest)
    how = {"placement": choices, "objective": goal.objective, "effort": effort, "figures": costs.on, "ends": ends}
    return zb_auto(*on, *sizes, goal.most, **how)  # type: ignore[arg-type]


def bound(costs: Figures, work: Workload, goal: Goal, offload: bool = False) -> Bound:
    """Return the lower bound on all schedules of a workload; with ``offload``, activations may move to host memory."""
    of = lower_bound_with_offload if offload else lower_bound
    return of(*costs.on(work.placement), work, goal.limit, goal.objective)


def quick_bound(costs: Figures, work: Workload, goal: Goal) -> float:
    """Return a lower bound in ms on whole sequences, in closed form, which takes little time.

    Raises:
        UserError: when the limit admits no schedule.
    """
    return lower_bound(*costs.on(work.placement), work, goal.limit, goal.objective, effort=None).value_ms


def fitted(schedule: Schedule, costs: Figures, objective: Metric, ends: bool = False) -> Schedule:
    """Refit a schedule for equal passes to these costs (``fit``). Other schedules are returned unchanged."""
    if schedule.name not in ADAPTING:
        return schedule
    return fit(schedule, *costs.on(schedule.placement), objective=objective, ends=ends)


def with_units(make: Callable[..., Schedule], costs: Figures, goal: Goal) -> Schedule:
    """Build a schedule of units: the shortest within a limit of activation memory, with the smallest of such units."""

    def timeline(unit: int) -> Timeline:
        schedule = make(unit_microbatches=unit)
        return timeline_of(schedule, *costs.on(schedule.placement))

    def rated(of: Timeline) -> tuple[float, float]:
        return length_ms(of, goal.objective), peak_memory(of, costs)

    most = math.inf if goal.limit is None else goal.limit
    return best_within(costs.num_ranks, costs.num_microbatches, timeline, rated, most).schedule


def limit_verdict(timeline: Timeline, costs: Figures, memory_limit: float) -> tuple[bool, str]:
    """Return whether the schedule is within the memory limit, and a sentence that states it."""
    peak = peak_memory(timeline, costs)
    is_met = within(peak, memory_limit)
    verdict = "met" if is_met else f"EXCEEDED by {timeline.schedule.name}"
    limit = costs.show(memory_limit)
    return is_met, f"memory limit {limit}: {verdict}, peak {costs.show(peak)} per rank"


def about_1p(costs: Figures) -> str | None:
    """Say how much memory ``1p`` is, where it is not that of as many microbatches as ranks, up to rounding."""
    peak, as_ranks = costs.peak_of_1f1b, costs.num_ranks * costs.microbatch
    if abs(peak - as_ranks) <= _ALIKE * as_ranks:
        return None
    return f"1p is {costs.show(peak)}: the peak of 1F1B with these costs"


def slower_than_1f1b(timeline: Timeline, costs: Figures, objective: Metric) -> str | None:
    """Return a sentence if 1F1B would be shorter than this schedule of the whole model, else None."""
    schedule = costs.build("1f1b")
    plain = timeline_of(schedule, *costs.on(schedule.placement))
    own_ms, plain_ms = (length_ms(of, objective) for of in (timeline, plain))
    if within(own_ms, plain_ms):
        return None
    own_peak, plain_peak = peak_memory(timeline, costs), peak_memory(plain, costs)
    return (
        f"SLOWER than 1f1b, which takes {plain_ms:,.1f} ms {objective} instead of {own_ms:,.1f} ms with these costs, "
        f"and keeps {costs.show(plain_peak)} per rank instead of {costs.show(own_peak)}"
    )


def peak_memory(timeline: Timeline, costs: Figures) -> float:
    """Return the peak activation memory over all ranks, in the unit of memory."""
    return max(rank_memory(timeline, costs))


def rank_memory(timeline: Timeline, costs: Figures) -> tuple[float, ...]:
    """Return the peak activation memory of each rank, in the unit of memory."""
    return most_kept(timeline, costs.on(timeline.schedule.placement)[1])


def message_memory(
    schedule: Schedule,
    message_bytes: float,
    post_receives: PostReceives = "early",
    lowered: Plan | None = None,
    widths: Sequence[float] = (),
) -> tuple[float, ...]:
    """Return the most bytes of each rank for messages that it sends and receives. What moves to host memory and what is
    gathered does not add any, because it does not post receives earlier.

    Args:
        lowered: the plan of the schedule with its messages, if it is known.
        widths: by stage, the size of what it hands on, in messages; by default, all are alike.
    """
    plan = lowered or unproved_plan_of(schedule, Additions(post_receives))
    return tuple(peak * message_bytes for peak in message_peaks(plan, widths))

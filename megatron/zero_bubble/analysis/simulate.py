"""How long a schedule takes and what it keeps, by the rules of the Zero Bubble paper (arXiv 2401.10241, section 2).

Every rank runs its list in order, one pass at a time. A pass starts when its rank is free and what it depends on has
arrived; a transfer takes ``comm`` and overlaps everything else.
"""

from __future__ import annotations

from megatron.zero_bubble.analysis.progress import progress
from megatron.zero_bubble.analysis.timeline import Span, Timeline
from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Pass, Schedule

__all__ = ["Span", "Timeline", "simulate"]


def simulate(schedule: Schedule, costs: PassCosts, memory: PassMemory | None = None) -> Timeline:
    """The timeline of ``schedule``, linear in its number of passes; without ``memory`` W keeps all that F added.

    Raises:
        ScheduleError: when the order deadlocks, naming rank and pass.
        UserError: when ``costs`` or ``memory`` are for another number of stages.
    """
    memory = PassMemory.uniform(schedule.placement) if memory is None else memory
    for what, figures in (("costs", costs), ("memory", memory)):
        if figures.num_stages != schedule.num_stages:
            raise UserError(
                f"{what} must have one figure per stage; {schedule.name} has {schedule.num_stages} stages and "
                f"{what} {figures.num_stages}; build both from the same placement"
            )
    stage_to_rank = schedule.placement.stage_to_rank
    free = [0.0] * len(schedule.order)
    end: dict[Pass, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.order]
    for rank, p, dependencies in progress(schedule):
        start = free[rank]
        for d in dependencies:
            start = max(start, end[d] + costs.comm(stage_to_rank[d.stage], rank))
        free[rank] = end[p] = start + costs.duration(p, schedule.num_slices)
        spans[rank].append(Span(p, start, free[rank]))
    peaks = tuple(_peak(schedule, rank, memory) for rank in range(len(schedule.order)))
    return Timeline(schedule, tuple(map(tuple, spans)), peaks)


def _peak(schedule: Schedule, rank: int, memory: PassMemory) -> float:
    """The most ``rank`` keeps at any time, in units of one microbatch on it; only the order matters."""
    kept = peak = 0.0
    for p in schedule.order[rank]:
        # F counts before it runs and the others after, so every sum is a moment's content between two passes.
        kept += memory.delta(p, schedule.num_slices)
        peak = max(peak, kept)
    return peak / sum(memory.activation[stage] for stage in schedule.placement.stages_of(rank))

"""What a rank keeps of its microbatches over time."""

from __future__ import annotations

from typing import NamedTuple

from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.costs import PassMemory
from megatron.zero_bubble.ir import Kind


class Kept(NamedTuple):
    """From ``at_ms`` on a rank keeps ``amount``, in the unit of the memory's figures."""

    at_ms: float
    amount: float


def kept(timeline: Timeline, memory: PassMemory) -> tuple[tuple[Kept, ...], ...]:
    """One curve a rank, a step a pass: F's part is due at its start, the others' at their end."""
    curves = []
    for row in timeline.spans:
        amount, curve = 0.0, []
        for p, start_ms, end_ms in row:
            amount += memory.delta(p, timeline.schedule.num_slices)
            curve.append(Kept(start_ms if p.kind is Kind.F else end_ms, amount))
        curves.append(tuple(curve))
    return tuple(curves)


def most_kept(timeline: Timeline, memory: PassMemory) -> tuple[float, ...]:
    """The most that every rank keeps, in the unit of the memory's figures."""
    on = timeline.schedule.placement
    whole = (sum(memory.activation[stage] for stage in on.stages_of(rank)) for rank in range(on.num_ranks))
    return tuple(peak * one for peak, one in zip(timeline.peak_activation, whole, strict=True))

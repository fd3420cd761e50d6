"""The table and the picture of offloading, computed by the planning library."""

from __future__ import annotations

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.render.svg import render_svg
from megatron.zero_bubble.core.schedules import SCHEDULES, build
from megatron.zero_bubble.planning.offload import OffloadPlan, plan_offload
from site_parts.markdown import table

_RANKS, _CHUNKS = 8, 4
_LINKS = (0.5, 1.0, 1.5, 2.0)
"""The time of both copies over that of F, B and W: k of the paper."""
_NAMES = ("1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b", "gis", "gis-h", "pipe-offload")


def by_schedule() -> str:
    """Bubble and peak of every schedule without offloading, and its peak with the least that delays nothing."""
    rows = []
    for name in _NAMES:
        before = _planned(name, _RANKS, 4 * _RANKS, 1.0, "none")
        peaks = (max(_planned(name, _RANKS, 4 * _RANKS, k, "auto").timeline.peak_activation) for k in _LINKS)
        timeline = before.timeline
        figures = f"{timeline.bubble_rate('makespan'):.1%}", f"{max(timeline.peak_activation):.3g}"
        rows.append((f"`{name}`", *figures, *(f"{peak:.3g}" for peak in peaks)))
    words = (
        f"Peaks in microbatches, for {_RANKS} ranks, {4 * _RANKS} microbatches and passes of equal length, where W "
        f"needs 30% of the memory of a microbatch; interleaved schedules have {_CHUNKS} chunks per rank. k is the time "
        "of both copies of a microbatch over the time of its F, B and W. No plan is longer than without offloading."
    )
    head = ("schedule", "bubble", "peak without", *(f"`auto`, k = {k:g}" for k in _LINKS))
    return f"{words}\n\n{table(head, rows)}"


def picture() -> str:
    """pipe-offload on 4 ranks, with all that moves without delay, as SVG."""
    return render_svg(_planned("pipe-offload", 4, 8, 0.8, "auto", 2).timeline)


def _planned(
    name: str, num_ranks: int, num_microbatches: int, k: float, choice: str, chunks: int = _CHUNKS
) -> OffloadPlan:
    own = chunks if SCHEDULES[name].shape == "interleaved" else None
    schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=own)
    per_rank = len(schedule.placement.stages_of(0))
    ones = (1.0 / per_rank,) * schedule.num_stages
    costs = PassCosts(ones, ones, ones, host_ms=tuple(1.5 * k * ms for ms in ones))
    memory = PassMemory.uniform(schedule.placement, 1.0, 0.3)
    return plan_offload(simulate(schedule, costs, memory), costs, memory, choice)


PARTS = {"offload-schedules": by_schedule}
PICTURES = {"offload.svg": picture}

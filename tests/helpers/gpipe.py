"""Schedules that are not in the registry, to test that plan and runtime accept any placement and order."""

from __future__ import annotations

from megatron.zero_bubble.core.ir import Kind, Pass, Placement, Schedule, Slices


def gpipe(placement: Placement, num_microbatches: int, num_slices: int = 1) -> Schedule:
    """Run all F, then all B, then all W, stage by stage; B and W take the slices in reverse order."""

    def row(rank: int) -> tuple[Pass, ...]:
        stages, microbatches, slices = placement.stages_of(rank), range(num_microbatches), range(num_slices)
        forward = [Pass(s, Kind.F, m, c) for s in stages for m in microbatches for c in slices]
        backward = [Pass(s, Kind.B, m, c) for s in reversed(stages) for m in microbatches for c in reversed(slices)]
        return (*forward, *backward, *(Pass(p.stage, Kind.W, p.microbatch, p.slice) for p in backward))

    return Schedule(
        "gpipe", placement, num_microbatches, tuple(map(row, range(placement.num_ranks))), Slices.even(num_slices)
    )


PLACEMENTS = [Placement.linear(3), Placement.vee(2), Placement.vee(3), Placement.interleaved(2, 3)]

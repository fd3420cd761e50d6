"""Insert recomputation as passes (R) into any schedule.

A backward that computes activations again waits for its gradient first, although only what follows needs it. As a pass
of its own, directly before the B, R runs while the gradient is still on its way: the bubble of 1F1B loses p-1 R, and so
does that of ZB-H1 (Mario, PPoPP'25, does the same for 1F1B, without a separate W).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from megatron.zero_bubble.core.ir import Pass, Schedule
from megatron.zero_bubble.core.ir.passes import BW, B, R


def with_recomputation(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """Return the passes of ``schedule``, and an R directly before every backward of ``stages``, by default of all.

    A schedule that has an R already stays as it is.
    """
    if schedule.recomputed:
        return schedule
    own = frozenset(range(schedule.num_stages) if stages is None else stages)
    return replace(schedule, order=tuple(tuple(_row(row, own)) for row in schedule.order))


def _row(row: Sequence[Pass], stages: Collection[int]) -> Iterator[Pass]:
    for p in row:
        if p.kind in (B, BW) and p.stage in stages:
            yield p._replace(kind=R)
        yield p

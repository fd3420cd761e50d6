"""What ran when on all ranks, and the costs that it implies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import torch.distributed as dist

from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.analysis.trace import Trace
from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.ir import Kind
from megatron.zero_bubble.measure.recorder import Marks


def gather_trace(name: str, marks: Marks, group: dist.ProcessGroup) -> Trace:
    """Put the ranks' parts of an iteration side by side; every rank of ``group`` calls it and gets the whole.

    Args:
        name: for the schedule that ran, whatever its passes.
    """
    rows: list[Any] = [None] * group.size()
    dist.all_gather_object(rows, marks.times(), group=group)
    return Trace.of(name, tuple(rows))


def median_costs(timelines: list[Timeline]) -> PassCosts:
    """What the measured iterations say of the costs: medians of every stage's passes and of the transfers.

    A fused BW counts as B with W = 0. A transfer shows only where its receiver stood idle; it is the time from the end
    of the producer to the start of the consumer.

    Args:
        timelines: measured iterations of one placement, the first ones (cold caches, allocations) left out.
    """
    durations: dict[tuple[int, Kind], list[float]] = {}
    transfers: list[float] = []
    for timeline in timelines:
        for row in timeline.spans:
            for work, start, end in row:
                kind = Kind.B if work.kind is Kind.BW else work.kind
                durations.setdefault((work.stage, kind), []).append(end - start)
        transfers.extend(_awaited_transfers(timeline))
    stages = range(timelines[0].schedule.num_stages)

    def medians(kind: Kind) -> tuple[float, ...]:
        return tuple(median(durations.get((stage, kind), [0.0])) for stage in stages)

    return PassCosts(medians(Kind.F), medians(Kind.B), medians(Kind.W), median(transfers) if transfers else 0.0)


def _awaited_transfers(timeline: Timeline) -> Iterator[float]:
    ends = {span.pass_: span.end_ms for row in timeline.spans for span in row}
    stage_to_rank = timeline.schedule.placement.stage_to_rank
    for rank, row in enumerate(timeline.spans):
        for previous, span in pairwise(row):
            for needed in timeline.schedule.dependencies(span.pass_):
                if stage_to_rank[needed.stage] != rank and ends[needed] > previous.end_ms:
                    yield max(0.0, span.start_ms - ends[needed])

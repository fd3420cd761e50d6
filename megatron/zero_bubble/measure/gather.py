"""Gathers the recorded times of all ranks, and derives pass costs from them."""

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
    """Combine the recordings of all ranks of an iteration. A collective call; every rank of ``group`` gets the result.

    Args:
        name: name for the schedule that ran.
    """
    rows: list[Any] = [None] * group.size()
    dist.all_gather_object(rows, marks.times(), group=group)
    return Trace.of(name, tuple(rows))


def median_costs(timelines: list[Timeline]) -> PassCosts:
    """Costs from measured iterations: the median pass times of every stage and the median transfer time.

    A fused BW counts as B with W = 0. A transfer can be measured only if its receiver was idle; its time is from the
    end of the producer to the start of the consumer.

    Args:
        timelines: measured iterations of one placement, without the first ones (cold caches, allocations).
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

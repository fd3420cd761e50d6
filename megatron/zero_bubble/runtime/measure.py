"""What ran when: a recorder of passes, and the costs that its timelines imply."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import torch.distributed as dist

from megatron.zero_bubble.analysis.timeline import Span, Timeline
from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.ir import Kind, Pass, Placement, Schedule
from megatron.zero_bubble.platforms import Platform


class Recorder:
    """Marks the begin and end of each pass of this rank while it is on; a ``PassObserver``.

    Args:
        platform: whose marks to take: device events on CUDA, the monotonic clock on the CPU.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._marks: list[tuple[Pass, object, object]] = []
        self._origin: object | None = None
        self._begun: object = None

    def start(self, group: dist.ProcessGroup) -> None:
        """Begin to record an iteration; the ranks of ``group`` meet here, which makes their clocks' zero the same."""
        self._marks = []
        self._platform.synchronize()
        dist.barrier(group=group)
        self._origin = self._platform.mark()

    def begin(self, work: Pass) -> None:
        if self._origin is not None:
            if self._marks and work == self._marks[0][0]:
                self._marks = []  # the iteration began anew, after an optimizer step that was wrong
            self._begun = self._platform.mark()

    def end(self, work: Pass) -> None:
        if self._origin is not None:
            self._marks.append((work, self._begun, self._platform.mark()))

    def stop(self) -> tuple[Span, ...]:
        """End the recording; this rank's passes in milliseconds since ``start``."""
        origin, self._origin = self._origin, None
        assert origin is not None, "stop() belongs to a start()"
        elapsed = self._platform.elapsed_ms
        return tuple(Span(work, elapsed(origin, start), elapsed(origin, end)) for work, start, end in self._marks)


def gather_timeline(name: str, spans: tuple[Span, ...], group: dist.ProcessGroup) -> Timeline:
    """Put the ranks' passes side by side; every rank of ``group`` calls it and gets the whole.

    Args:
        name: for the schedule that ran, whatever its passes.
    """
    rows: list[Any] = [None] * group.size()
    dist.all_gather_object(rows, spans, group=group)
    stage_to_rank = {span.pass_.stage: rank for rank, row in enumerate(rows) for span in row}
    placement = Placement(tuple(stage_to_rank[stage] for stage in sorted(stage_to_rank)))
    order = tuple(tuple(span.pass_ for span in row) for row in rows)
    num_microbatches = 1 + max(p.microbatch for row in order for p in row)
    return Timeline(Schedule(name, placement, num_microbatches, order), tuple(rows))


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

"""What ran when: a recorder of passes, and the costs that its timelines imply."""

from __future__ import annotations

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


def median_costs(timelines: list[Timeline], comm_ms: float = 0.0) -> PassCosts:
    """The median duration of each kind of pass on each stage; a fused BW counts as B with W = 0.

    Args:
        timelines: measured iterations of one placement, the first ones (cold caches, allocations) left out.
        comm_ms: the latency of a transfer, which passes do not show.
    """
    durations: dict[tuple[int, Kind], list[float]] = {}
    for timeline in timelines:
        for row in timeline.spans:
            for work, start, end in row:
                kind = Kind.B if work.kind is Kind.BW else work.kind
                durations.setdefault((work.stage, kind), []).append(end - start)
    stages = range(timelines[0].schedule.num_stages)

    def medians(kind: Kind) -> tuple[float, ...]:
        return tuple(median(durations.get((stage, kind), [0.0])) for stage in stages)

    return PassCosts(medians(Kind.F), medians(Kind.B), medians(Kind.W), comm_ms)

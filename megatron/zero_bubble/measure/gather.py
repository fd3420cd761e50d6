"""Gathers the recorded times of all ranks, and derives pass costs from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import mul
from statistics import median
from typing import Any

import torch.distributed as dist

from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.analysis.trace import Trace
from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.ir import Kind, Slices
from megatron.zero_bubble.measure.recorder import Marks


def gather_trace(name: str, marks: Marks, group: dist.ProcessGroup, slices: Slices | None = None) -> Trace:
    """Combine the recordings of all ranks of an iteration. A collective call; every rank of ``group`` gets the result.

    Args:
        name: name for the schedule that ran.
        slices: the cuts of its sequences; even ones if not given.
    """
    rows: list[Any] = [None] * group.size()
    dist.all_gather_object(rows, marks.times(), group=group)
    return Trace.of(name, tuple(rows), slices)


def median_costs(timelines: list[Timeline]) -> PassCosts:
    """Costs from measured iterations: the median pass times of every stage and the median transfer time.

    A fused BW counts as B with W = 0. If sequences are cut, the shares of attention follow from how much longer later
    slices take than their tokens alone would explain. A transfer can be measured only if its receiver was idle; its
    time is from the end of the producer to the start of the consumer.

    Args:
        timelines: measured iterations of one placement, without the first ones (cold caches, allocations).
    """
    durations: dict[tuple[int, Kind], dict[int, list[float]]] = {}
    transfers: list[float] = []
    for timeline in timelines:
        for row in timeline.spans:
            for work, start, end in row:
                kind = Kind.B if work.kind is Kind.BW else work.kind
                durations.setdefault((work.stage, kind), {}).setdefault(work.slice, []).append(end - start)
        transfers.extend(_awaited_transfers(timeline))
    schedule = timelines[0].schedule

    def medians(kind: Kind) -> list[list[float]]:
        """Per stage, the median time of each slice; no slices for a pass that did not run."""
        of_stages = (durations.get((stage, kind), {}) for stage in range(schedule.num_stages))
        return [[median(slices[at]) for at in sorted(slices)] for slices in of_stages]

    f, b, w = (medians(kind) for kind in (Kind.F, Kind.B, Kind.W))
    forward, backward, wgrad = (tuple(map(sum, times)) for times in (f, b, w))
    shares = (tuple(attention_share(times, schedule.slices) for times in of_stages) for of_stages in (f, b))
    costs = PassCosts(forward, backward, wgrad, median(transfers) if transfers else 0.0)
    return costs.with_attention(*shares)


def attention_share(times_ms: Sequence[float], slices: Slices) -> float:
    """The share of attention in a pass whose slices take ``times_ms``, by least squares; 0 if nothing was cut.

    With share a, slice i from x to y takes (y - x)(1 - a) + (y^2 - x^2)a of the whole time.
    """
    whole = sum(times_ms)
    if not whole or len(times_ms) < 2:
        return 0.0
    extra = [end * end - start * start - (end - start) for start, end in map(slices.bounds, range(len(slices)))]
    above = [ms / whole - share for ms, share in zip(times_ms, slices.shares, strict=True)]
    fitted = sum(map(mul, extra, above)) / sum(part * part for part in extra)
    return min(1.0, max(0.0, fitted))


def _awaited_transfers(timeline: Timeline) -> Iterator[float]:
    ends = {span.pass_: span.end_ms for row in timeline.spans for span in row}
    stage_to_rank = timeline.schedule.placement.stage_to_rank
    for rank, row in enumerate(timeline.spans):
        for previous, span in pairwise(row):
            for needed in timeline.schedule.dependencies(span.pass_):
                if stage_to_rank[needed.stage] != rank and ends[needed] > previous.end_ms:
                    yield max(0.0, span.start_ms - ends[needed])

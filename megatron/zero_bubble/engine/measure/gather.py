"""Gathers the recorded times of all ranks, and derives pass costs from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from operator import add, mul
from statistics import mean, median
from typing import Any

import torch.distributed as dist

from megatron.zero_bubble.core.analysis.timeline import Box, Timeline
from megatron.zero_bubble.core.analysis.trace import Trace
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.costs.lengths import Whole
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.ir import Kind, Slices
from megatron.zero_bubble.core.ir.offload import Evict, Fetch
from megatron.zero_bubble.core.ir.passes import VOCABULARY_KINDS
from megatron.zero_bubble.core.ir.shards import Gather, Reduce
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, algorithm_of
from megatron.zero_bubble.engine.measure.messages import measured_message_ms
from megatron.zero_bubble.engine.measure.recorder import UnreadMarks


def gather_trace(name: str, marks: UnreadMarks, group: dist.ProcessGroup) -> Trace:
    """Combine the recordings of all ranks of an iteration. A collective call; every rank of ``group`` gets the result.

    Args:
        name: name for the schedule that ran.
    """
    rows: list[Any] = [None] * group.size()
    dist.all_gather_object(rows, marks.times(), group=group)
    ran = marks.schedule
    if ran is None:
        return Trace.of(name, tuple(rows))
    return Trace.of(name, tuple(rows), ran.slices, ran.make_flow, ran.pairs)


def median_costs(
    timelines: list[Timeline], before: PassCosts | None = None, whole: Whole | None = None, varies: bool = False
) -> PassCosts:
    """Costs from measured iterations: the median pass times of every stage and the median transfer time, those of
    vocabulary parallelism if the schedule has its passes, those of copies to the host and back of every stage of which
    something moves, and those of the gathers and reductions of every stage that is sharded.

    A fused BW counts only for a stage without split backwards: in the parts that B and W had ``before``, else as B with
    W = 0. If sequences are cut, the shares of attention follow from how much longer later
    slices take than their tokens alone would explain. A transfer can be measured only if its receiver was idle; its
    time is from the end of the producer to the start of the consumer, without the time of a message on both ranks
    (``measured_message_ms``), which can be measured only if the receiver was not idle.

    Args:
        timelines: measured iterations of one placement, without the first ones (cold caches, allocations).
        before: what an earlier measurement of the same stages gave, if there was one.
        whole: the sequence that the costs are for, if microbatches have different loads. Their times are added up per
            iteration, and divided by the parts of ``whole`` that they are; the shares of attention are its own.
        varies: whether microbatches have different lengths, which nobody knows. The costs are then those of one that
            takes as long as the mean of an iteration.
    """
    durations: dict[tuple[int, Kind], dict[int, list[float]]] = {}
    transfers = _Transfers()
    of_iterations = _of_mean_microbatches(timelines) if varies else [_durations(each, whole) for each in timelines]
    for timeline, of_iteration in zip(timelines, of_iterations, strict=True):
        for key, times in of_iteration.items():
            for slice_, of_slice in times.items():
                durations.setdefault(key, {}).setdefault(slice_, []).extend(of_slice)
        transfers.add(timeline)
    schedule = timelines[0].schedule
    for stage in range(schedule.num_stages):
        if (stage, Kind.B) not in durations:
            for kind, of_slices in _parts(durations.get((stage, Kind.BW), {}), stage, before).items():
                durations[stage, kind] = of_slices

    def medians(kind: Kind) -> list[list[float]]:
        """Per stage, the median time of each slice; no slices for a pass that did not run."""
        of_stages = (durations.get((stage, kind), {}) for stage in range(schedule.num_stages))
        return [[median(slices[at]) for at in sorted(slices)] for slices in of_stages]

    f, b, w, r = (medians(kind) for kind in (Kind.F, Kind.B, Kind.W, Kind.R))
    forward, backward, wgrad, again = (tuple(map(sum, times)) for times in (f, b, w, r))
    backward = tuple(map(add, backward, again))  # as of a B that computes activations again itself
    shares = [tuple(attention_share(times, schedule.slices) for times in of_stages) for of_stages in (f, b)]
    if whole is not None:
        shares = [(share,) * schedule.num_stages for share in (whole.attention, whole.backward_attention)]
    transfer_ms = median(transfers.messages) if transfers.messages else 0.0
    message_ms = measured_message_ms(timelines, transfer_ms)
    comm_ms = max(0.0, transfer_ms - 2 * message_ms)
    costs = PassCosts(forward, backward, wgrad, comm_ms, host_ms=_copies_ms(timelines), message_ms=message_ms)
    costs = replace(costs.with_attention(*shares), recompute_ms=again)
    costs = replace(costs, gather_ms=_of_stages_ms(timelines, Gather), reduce_ms=_of_stages_ms(timelines, Reduce))
    algorithm = algorithm_of(schedule)
    if algorithm is None:
        return costs
    ranks = slice(schedule.num_ranks)  # passes of the vocabulary are named after the first stage of their rank
    s, t, i, j = (tuple(map(sum, medians(kind)[ranks])) for kind in (Kind.S, Kind.T, Kind.I, Kind.J))
    collective_ms = max(0.0, transfers.collective_ms(algorithm) - comm_ms)
    return replace(costs, vocabulary=VocabularyCosts(s, t, i, j, collective_ms))


def _boxes(timeline: Timeline) -> list[Box]:
    return [box for rank in range(len(timeline.spans)) for box in timeline.boxes(rank)]


def _durations(timeline: Timeline, whole: Whole | None) -> dict[tuple[int, Kind], dict[int, list[float]]]:
    """The times of an iteration by stage, kind and slice; one time for ``whole`` if microbatches have loads. A pass of
    a pair counts only for a stage and kind of which no pass ran alone.
    """
    durations: dict[tuple[int, Kind], dict[int, list[float]]] = {}
    parts: dict[tuple[int, Kind], float] = {}
    boxes = _boxes(timeline)
    alone = {(p.stage, p.kind) for box in boxes if len(box.works) == 1 for p in box.works}
    together = {p for box in boxes if len(box.works) > 1 for p in box.works if (p.stage, p.kind) in alone}
    for row in timeline.spans:
        for work, start, end in row:
            if work in together:
                continue
            key = work.stage, work.kind
            durations.setdefault(key, {}).setdefault(work.slice, []).append(end - start)
            if timeline.loads and whole is not None:
                parts[key] = parts.get(key, 0.0) + whole.parts(work.kind, timeline.loads[work.microbatch])
    return {key: {0: [sum(durations[key][0]) / part]} for key, part in parts.items()} or durations


def _of_mean_microbatches(timelines: Sequence[Timeline]) -> list[dict[tuple[int, Kind], dict[int, list[float]]]]:
    """Per iteration, the times of its mean microbatch by stage and kind.

    Iterations have other lengths, so they are scaled such that F of all stages takes equally long in each: as long as
    in the median iteration. A pass that only some microbatches have, such as a fused BW, is compared with their F.
    """
    found, wholes = [], []
    for timeline in timelines:
        times = {span.pass_: span.end_ms - span.start_ms for row in timeline.spans for span in row}
        sums: dict[tuple[int, Kind], tuple[float, float]] = {}
        for work, ms in times.items():
            own, of_forwards = sums.get((work.stage, work.kind), (0.0, 0.0))
            sums[work.stage, work.kind] = own + ms, of_forwards + times[work._replace(kind=Kind.F)]
        schedule = timeline.schedule
        forward = [sums[stage, Kind.F][0] / schedule.num_microbatches for stage in range(schedule.num_stages)]
        found.append({key: own / base * forward[key[0]] if base else 0.0 for key, (own, base) in sums.items()})
        wholes.append(sum(forward))
    usual = median(wholes)
    return [
        {key: {0: [ms * usual / whole if whole else ms]} for key, ms in of_mean.items()}
        for of_mean, whole in zip(found, wholes, strict=True)
    ]


def _parts(fused: dict[int, list[float]], stage: int, before: PassCosts | None) -> dict[Kind, dict[int, list[float]]]:
    """Divide the times of fused backwards, by slice, into those of B and W."""
    b, w = (1.0, 0.0) if before is None else (before.backward_ms[stage], before.wgrad_ms[stage])
    of = {Kind.B: b, Kind.W: w} if w else {Kind.B: 1.0}
    return {
        kind: {at: [ms * part / sum(of.values()) for ms in times] for at, times in fused.items()}
        for kind, part in of.items()
    }


def _copies_ms(timelines: list[Timeline]) -> tuple[float, ...]:
    """Per stage, the median time of a copy of a microbatch to the host or back; 0 for a stage without copies.

    If only some slices of a stage moved, they are taken for the share that they are of a microbatch.
    """
    durations: dict[int, dict[int, list[float]]] = {}
    for span in (span for timeline in timelines for row in timeline.lanes for span in row):
        if isinstance(span.op, (Evict, Fetch)):
            of_slices = durations.setdefault(span.op.forward.stage, {})
            of_slices.setdefault(span.op.forward.slice, []).append(span.end_ms - span.start_ms)
    schedule = timelines[0].schedule
    shares = schedule.slices.shares

    def whole_ms(of_slices: dict[int, list[float]]) -> float:
        moved = sum(shares[at] for at in of_slices)
        return sum(map(median, of_slices.values())) / moved if moved else 0.0

    return tuple(whole_ms(durations.get(stage, {})) for stage in range(schedule.num_stages))


def _of_stages_ms(timelines: list[Timeline], kind: type[Gather | Reduce]) -> tuple[float, ...]:
    """Per stage, the median time of its collectives of one kind; 0 if nothing is sharded.

    A collective that begins before the first pass also waits for replicas that have not started yet, so it does not
    count. A stage whose weights are gathered only then has the others' median; 0 if this is so for all stages.
    """
    durations: defaultdict[int, list[float]] = defaultdict(list)
    for span in (span for timeline in timelines for row in timeline.lanes for span in row):
        if isinstance(span.op, kind) and span.start_ms > 0:
            durations[span.op.stage].append(span.end_ms - span.start_ms)
    usual = median(map(median, durations.values())) if durations else 0.0
    return tuple(median(durations.get(stage, [usual])) for stage in range(timelines[0].schedule.num_stages))


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


_BARRIERS: dict[Algorithm, tuple[Kind, ...]] = {
    1: (Kind.S, Kind.L, Kind.T, Kind.B, Kind.BW),
    2: (Kind.S, Kind.L),
}
"""The passes between F and B of the last stage, with that B, that take the results of collectives."""


class _Transfers:
    """Times of transfers for which their receiver was idle.

    Attributes:
        messages: times of messages between two ranks.
        collectives: times of collectives, by the kind of the pass that takes the result. That of the losses includes L,
            which counts as a part of it (``VocabularyCosts``).
    """

    def __init__(self) -> None:
        self.messages: list[float] = []
        self.collectives: dict[Kind, list[float]] = {}

    def add(self, timeline: Timeline) -> None:
        ends = {p: box.end_ms for box in _boxes(timeline) for p in box.works}
        stage_to_rank = timeline.schedule.placement.stage_to_rank
        for rank, row in enumerate(timeline.spans):
            for previous, (work, start_ms, end_ms) in pairwise(row):
                needed = [p for p in timeline.schedule.dependencies(work) if stage_to_rank[p.stage] != rank]
                last = max(needed, key=ends.__getitem__, default=None)  # a collective is complete when all have started
                if last is None or ends[last] <= previous.end_ms:
                    continue
                if work.kind in VOCABULARY_KINDS or last.kind in VOCABULARY_KINDS:
                    ready_ms = end_ms if work.kind is Kind.L else start_ms
                    self.collectives.setdefault(work.kind, []).append(max(0.0, ready_ms - ends[last]))
                else:
                    self.messages.append(max(0.0, start_ms - ends[last]))

    def collective_ms(self, algorithm: Algorithm) -> float:
        """The mean of the median times of the collectives between F and B of the last stage, one of each kind after the
        other, for which all ranks wait; without these, of the others.
        """
        medians = {kind: median(times) for kind, times in self.collectives.items()}
        barriers = [ms for kind, ms in medians.items() if kind in _BARRIERS[algorithm]]
        return mean(barriers or medians.values()) if medians else 0.0

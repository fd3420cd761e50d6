"""Select what moves to host memory (PipeOffload, arXiv 2503.01328, section 4).

Stages go as a whole, those first whose lifespans are longest per time on the lane; each rank takes as few stages as
give it the least peak, so that more offloading never raises the peak.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from megatron.zero_bubble.analysis.timeline import Span, Timeline
from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.ir.passes import BW, B, W
from megatron.zero_bubble.plan.copies import Candidate, candidates, fit_copies, peak_with
from megatron.zero_bubble.plan.offload import Move, evenly

_ROUNDING = 1e-9


def select_hidden(
    timeline: Timeline,
    costs: PassCosts,
    memory: PassMemory,
    share: float = 1.0,
    limit: float | None = None,
    room: Sequence[float] | None = None,
    slower: float = 1.0,
) -> tuple[Move, ...]:
    """Select moves whose copies delay no pass of ``timeline``.

    Args:
        timeline: the schedule without offloading.
        share: the most that may move, from 0 to 1 of the forwards of each rank.
        limit: device memory per rank, in the unit of ``memory``. A rank that can meet it moves no more than it needs
            to; without a limit, or if a rank cannot meet it, the rank takes the least peak.
        room: host memory per rank, in the same unit; None for no limit.
        slower: as if all passes took longer by this factor; above 1, the copies may delay passes.
    """
    moves: list[Move] = []
    for rank, spans in enumerate(timeline.spans):
        row = spans if slower == 1 else [Span(p, start * slower, end * slower) for p, start, end in spans]
        of_rank = candidates(row, costs, memory, timeline.schedule.slices)
        space = math.inf if room is None else room[rank]
        passes = [span.pass_ for span in row]
        best: list[Move] = []
        least = peak_with(passes, best, memory, timeline.schedule.slices)
        for movable in _sets(of_rank, share):
            if limit is not None and least <= limit * (1 + _ROUNDING):
                break
            found = fit_copies(row, movable, space)
            peak = peak_with(passes, found, memory, timeline.schedule.slices)
            if peak < least * (1 - _ROUNDING):
                best, least = found, peak
        moves += best
    return tuple(moves)


def lane_load(timeline: Timeline, costs: PassCosts, share: float = 1.0) -> float:
    """Return the largest ratio, over the ranks, of the time of all copies to that of all passes, if ``share`` of the
    forwards of each rank moves: k of the paper (section 2) for the whole share.
    """
    memory = PassMemory.uniform(timeline.schedule.placement)
    loads = [0.0]
    for row in timeline.spans:
        of_rank = candidates(row, costs, memory, timeline.schedule.slices)
        *_, movable = _sets(of_rank, share) if of_rank and share else [[]]
        work = sum(span.end_ms - span.start_ms for span in row)
        copies = 2 * sum(each.ms for each in movable)
        loads.append(copies / work if work else 0.0)
    return max(loads)


def peaks_with(timeline: Timeline, moves: Collection[Move], memory: PassMemory) -> tuple[float, ...]:
    """Return the peak memory of every rank with these moves, in the unit of ``memory``."""
    slices = timeline.schedule.slices
    return tuple(peak_with([span.pass_ for span in row], moves, memory, slices) for row in timeline.spans)


def pending_wgrads(timeline: Timeline, memory: PassMemory) -> tuple[float, ...]:
    """Return the most memory of operands on each rank that B's have left for their W's, in the unit of ``memory``.

    No forward that moves reduces it: it is the peak that offloading leaves where W's are far behind.
    """
    slices = timeline.schedule.slices
    peaks = []
    for row in timeline.spans:
        pending = peak = 0.0
        for p, _, _ in row:
            size = memory.wgrad[p.stage] * slices.shares[p.slice]
            if p.kind is W:
                pending -= size
            elif p.kind is B:
                pending += size
            peak = max(peak, pending + (size if p.kind is BW else 0.0))
        peaks.append(peak)
    return tuple(peaks)


def _sets(of_rank: Sequence[Candidate], share: float) -> Iterator[list[Candidate]]:
    """Yield growing sets of candidates in the order of their forwards: one stage more each, the last one in part."""
    by_stage: defaultdict[int, list[Candidate]] = defaultdict(list)
    for candidate in of_rank:
        by_stage[candidate.lifespan.forward.stage].append(candidate)
    left = round(share * len(of_rank))
    taken: list[Candidate] = []
    for _, stage in sorted(by_stage.items(), key=lambda each: _gain(each[1]), reverse=True):
        number = min(left, len(stage))
        if not number:
            return
        taken += evenly(stage, number)
        left -= number
        yield sorted(taken, key=lambda each: each.lifespan.begin)


def _gain(of_stage: Sequence[Candidate]) -> float:
    return sum(each.gain for each in of_stage) / len(of_stage)

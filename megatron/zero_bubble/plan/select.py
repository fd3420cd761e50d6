"""Select what moves to host memory (PipeOffload, arXiv 2503.01328, section 4).

The stages that are kept longest per time on the lane move first, and of a stage that moves in part, the microbatches
that are kept longest. Each rank takes the number that gives it the least peak: moving more can need more memory,
because both copies exist meanwhile.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from megatron.zero_bubble.analysis.timeline import Span, Timeline
from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.ir.passes import BW, B, W
from megatron.zero_bubble.plan.copies import Candidate, RowMemory, candidates, fit_copies
from megatron.zero_bubble.plan.offload import Move, evenly

_ROUNDING = 1e-9
_PARTS = 4
"""The least number of parts of the forwards of a rank from which the best number to move is chosen."""


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
        space = math.inf if room is None else room[rank]
        moves += _of_rank(row, timeline, costs, memory, share, limit, space)
    return tuple(moves)


def _of_rank(
    row: Sequence[Span],
    timeline: Timeline,
    costs: PassCosts,
    memory: PassMemory,
    share: float,
    limit: float | None,
    room: float,
) -> list[Move]:
    slices = timeline.schedule.slices
    of_rank = candidates(row, costs, memory, slices)
    held = RowMemory(row, of_rank, memory, slices)
    chunks = len({each.lifespan.forward.stage for each in of_rank})
    best: list[Move] = []
    least = held.peak(best)
    if limit is not None and least <= limit * (1 + _ROUNDING):
        return best
    for number in reversed(_numbers(len(of_rank), chunks, share)):
        found = fit_copies(row, longest(of_rank, number), room)
        peak = held.peak(found)
        enough = limit is not None and peak <= limit * (1 + _ROUNDING)
        if peak <= least * (1 + _ROUNDING) or enough:
            best, least = found, min(peak, least)
        elif best:
            break
    return best


def _numbers(total: int, chunks: int, share: float) -> list[int]:
    """The numbers of forwards to choose from: equal parts of all, as far as ``share`` reaches, and the share itself."""
    parts = chunks * -(-_PARTS // max(1, chunks))
    numbers = {round(total * part / parts) for part in range(1, parts + 1)}
    most = round(total * share)
    return sorted(number for number in {*numbers, most} if 0 < number <= most)


def longest(of_rank: Sequence[Candidate], number: int) -> list[Candidate]:
    """Return the ``number`` forwards that are kept longest per time on the lane, in the order of ``of_rank``: stages as
    a whole by their mean, and of the last one its longest.
    """
    by_stage: defaultdict[int, list[Candidate]] = defaultdict(list)
    for each in of_rank:
        by_stage[each.lifespan.forward.stage].append(each)
    chosen: set[Candidate] = set()
    for stage in sorted(by_stage.values(), key=_mean_gain, reverse=True):
        chosen.update(_longest_of_stage(stage, min(number - len(chosen), len(stage))))
    return [each for each in of_rank if each in chosen]


def _mean_gain(stage: Sequence[Candidate]) -> float:
    return sum(each.gain for each in stage) / len(stage)


def _longest_of_stage(stage: Sequence[Candidate], number: int) -> Iterable[Candidate]:
    """Return the longest ``number``; at equal lifespans, at even distances, because neighbours are kept together."""
    if number in (0, len(stage)):
        return stage[:number]
    shortest = sorted((each.gain for each in stage), reverse=True)[number - 1]
    above, below = shortest * (1 + _ROUNDING), shortest * (1 - _ROUNDING)
    longer = [each for each in stage if each.gain > above]
    alike = [each for each in stage if below <= each.gain <= above]
    return [*longer, *evenly(alike, number - len(longer))]


def lane_load(timeline: Timeline, costs: PassCosts, share: float = 1.0) -> float:
    """Return the largest ratio, over the ranks, of the time of all copies to that of all passes, if ``share`` of the
    forwards of each rank moves: k of the paper (section 2) for the whole share.
    """
    memory = PassMemory.uniform(timeline.schedule.placement)
    loads = [0.0]
    for row in timeline.spans:
        of_rank = candidates(row, costs, memory, timeline.schedule.slices)
        movable = longest(of_rank, round(share * len(of_rank))) if share else []
        work = sum(span.end_ms - span.start_ms for span in row)
        copies = 2 * sum(each.ms for each in movable)
        loads.append(copies / work if work else 0.0)
    return max(loads)


def peaks_with(timeline: Timeline, moves: Collection[Move], costs: PassCosts, memory: PassMemory) -> tuple[float, ...]:
    """Return the peak memory of every rank with these moves, in the unit of ``memory``."""
    on, slices = timeline.schedule.placement, timeline.schedule.slices
    by_rank: defaultdict[int, list[Move]] = defaultdict(list)
    for move in moves:
        by_rank[on.stage_to_rank[move.forward.stage]].append(move)
    return tuple(
        RowMemory(row, candidates(row, costs, memory, slices), memory, slices).peak(by_rank[rank])
        for rank, row in enumerate(timeline.spans)
    )


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

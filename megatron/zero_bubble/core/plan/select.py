"""Select what moves to host memory (PipeOffload, arXiv 2503.01328, section 4).

The stages that are kept longest per time on a lane move first, and of a stage that moves in part, the microbatches
that are kept longest. More moves can need more memory, because both copies exist while a copy waits for its lane. So
each rank takes the number that gives it the least peak, out of numbers that do not depend on the share: a larger share
only adds numbers to choose from, and the peak of no rank grows with it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate

from megatron.zero_bubble.core.analysis.score import ROUNDING, within
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir.passes import BW, B, W
from megatron.zero_bubble.core.plan.copies import Interval, RowMemory, fit_copies, intervals, of_ops
from megatron.zero_bubble.core.plan.offload import Move, spread

_FEW = 32
"""Up to so many forwards on a rank, any number of them may move."""
_PARTS = 8
"""The least number of equal parts into which more forwards are divided; each chunk has a whole number of them."""
_Factor = Callable[[float], float]


class Selection:
    """Selects moves for a timeline without offloading; ``costs`` and ``memory`` are those of its simulation."""

    def __init__(self, timeline: Timeline, costs: PassCosts, memory: PassMemory) -> None:
        self._ranks = [_Rank(timeline, rank, costs, memory) for rank in range(len(timeline.spans))]

    def moves(
        self,
        share: float = 1.0,
        limit: float | None = None,
        room: Sequence[float] | None = None,
        slower: float | None = 1.0,
    ) -> tuple[Move, ...]:
        """Select moves whose copies delay no pass.

        Args:
            share: the most that may move, from 0 to 1 of the forwards of each rank. Without ``limit``, a larger share
                raises the peak of no rank.
            limit: device memory per rank, in the unit of the memory figures. A rank that can meet it moves no more than
                it needs to; without a limit, or if a rank cannot meet it, the rank takes the least peak.
            room: host memory per rank, in the same unit; None for no limit.
            slower: as if all passes took longer by this factor; above 1, the copies may delay passes. None for the
                factor that each number of moves needs, so that its copies of both directions together take no longer
                than the passes.
        """
        return tuple(move for _, moves in self._by_rank(share, limit, room, slower) for move in moves)

    def meets(self, limit: float, room: Sequence[float] | None, slower: float) -> bool:
        """Whether the moves for these arguments meet the limit on every rank."""
        return all(within(peak, limit) for peak, _ in self._by_rank(1.0, limit, room, slower))

    def _by_rank(
        self, share: float, limit: float | None, room: Sequence[float] | None, slower: float | None
    ) -> Iterator[tuple[float, list[Move]]]:
        most = -math.inf if limit is None else limit * (1 + ROUNDING)
        factor = cache(self._load) if slower is None else lambda _: slower
        for rank, space in zip(self._ranks, room or (math.inf,) * len(self._ranks), strict=True):
            yield rank.best(share, most, space, factor)

    def _load(self, share: float) -> float:
        """The largest ratio, over the ranks, of the time of the copies of this share, in both directions, to that of
        all passes; at least 1. For the whole share, it is k of the paper (section 2). Half of it would do for the
        lanes, but then fewer round trips would fit between a forward and its backward, and peaks would be higher.
        """
        return max(1.0, *(rank.load(share) for rank in self._ranks))


class _Rank:
    """What may move on one rank."""

    def __init__(self, timeline: Timeline, rank: int, costs: PassCosts, memory: PassMemory) -> None:
        self._row, slices = of_ops(timeline.spans[rank], timeline.schedule.pairs), timeline.schedule.slices
        self._intervals = intervals(self._row, costs, memory, slices)
        self._memory = RowMemory(self._row, self._intervals, memory, slices)
        order = list(_longest_first(self._intervals))
        places = {each.lifespan.forward: place for place, each in enumerate(order)}
        self._places = [places[each.lifespan.forward] for each in self._intervals]
        self._copies_ms = list(accumulate((2 * each.ms for each in order), initial=0.0))
        self._work_ms = sum(end - start for _, start, end in timeline.spans[rank])
        self._numbers = _numbers(len(order), len(timeline.schedule.placement.stages_of(rank)))
        self._longest_away = cache(self._unhindered)

    def load(self, share: float) -> float:
        """The ratio of the time of the copies of this share, in both directions, to that of all passes."""
        return self._copies_ms[round(share * len(self._intervals))] / self._work_ms if self._work_ms else 0.0

    def best(self, share: float, most: float, room: float, slower: _Factor) -> tuple[float, list[Move]]:
        """Return the moves and the peak with them: the fewest whose peak is at most ``most``, or else the fewest of
        those with the least peak.
        """
        nothing: tuple[float, list[Move]] = (self._memory.peak(()), [])
        if nothing[0] <= most:
            return nothing
        total = len(self._intervals)
        numbers = [number for number in self._numbers if number <= round(share * total)]
        tried = cache(lambda number: self._tried(number, room, slower(number / total)))
        at_least = cache(lambda number: self._at_least(number, slower(number / total)))
        for number in numbers if most > -math.inf else ():
            if at_least(number) <= most and tried(number)[0] <= most:
                return tried(number)
        best, least = nothing, nothing[0]
        for number in reversed(numbers):
            if at_least(number) > least:
                break  # nor can fewer moves need less
            peak, moves = tried(number)
            if within(peak, least):
                best, least = (peak, moves), min(peak, least)
        return best if least < nothing[0] * (1 - ROUNDING) else nothing

    def _tried(self, number: int, room: float, slower: float) -> tuple[float, list[Move]]:
        pairs = zip(self._intervals, self._places, strict=True)
        chosen = [each for each, place in pairs if place < number]
        if slower != 1:
            chosen = [each._replace(ms=each.ms / slower) for each in chosen]
        moves = fit_copies(self._row, chosen, room)
        return self._memory.peak(moves), moves

    def _at_least(self, number: int, slower: float) -> float:
        """A lower bound of the peak: that of copies which never wait for a lane. It does not grow with the number."""
        pairs = zip(self._longest_away(slower), self._places, strict=True)
        return self._memory.peak_without(away for away, place in pairs if place < number)

    def _unhindered(self, slower: float) -> list[tuple[int, int, float]]:
        """Between which places in the row each candidate can be away at most, and its size."""
        starts, ends = [span.start_ms for span in self._row], [span.end_ms for span in self._row]
        slack = 100 * ROUNDING * max(ends, default=0.0)
        found = []
        for (_, begin, end), ms, size, _ in self._intervals:
            release = bisect_left(starts, ends[begin] + ms / slower - slack)
            fetch = bisect_right(ends, starts[end] - ms / slower + slack)
            found.append((release, fetch, size) if release < fetch else (0, 0, 0.0))
        return found


def _numbers(total: int, chunks: int) -> list[int]:
    """The numbers of forwards to choose from, of ``total`` on a rank: all, or those of equal parts."""
    if total <= _FEW:
        return list(range(1, total + 1))
    parts = chunks * -(-_PARTS // max(1, chunks))
    return sorted({round(total * part / parts) for part in range(1, parts + 1)})


def _longest_first(of_rank: Sequence[Interval]) -> Iterator[Interval]:
    """Yield the forwards that are kept longest per time on a lane first: stages as a whole by their mean; in a stage,
    those with equal lifespans at even distances, because neighbours are kept together.
    """
    by_stage: defaultdict[int, list[Interval]] = defaultdict(list)
    for each in of_rank:
        by_stage[each.lifespan.forward.stage].append(each)
    for stage in sorted(by_stage.values(), key=_mean_gain, reverse=True):
        alike: list[list[Interval]] = []
        for each in sorted(stage, key=_gain, reverse=True):
            if not alike or each.gain < alike[-1][0].gain * (1 - ROUNDING):
                alike.append([])
            alike[-1].append(each)
        for group in alike:
            yield from spread(sorted(group, key=_begin))


def _gain(interval: Interval) -> float:
    return interval.gain


def _begin(interval: Interval) -> int:
    return interval.lifespan.begin


def _mean_gain(stage: Sequence[Interval]) -> float:
    return sum(each.gain for each in stage) / len(stage)


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

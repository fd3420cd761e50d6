"""Divide layers among stages such that the busiest rank has as little work as possible.

Equal layers are given one by one to the rank with the least work, which is exact for any placement. Layers that differ
are cut by dynamic programming over the ranks in order. With one stage per rank, a rank takes the next layers from the
front; on a V it takes them from the front and from the back. The states that are reachable within a bound are bit sets,
and bisection finds the smallest bound. For other placements, the stages are cut instead of the ranks, and then evened
by single layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter

from megatron.zero_bubble.core.analysis.score import ROUNDING, is_less
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement


def cut(placement: Placement, work: Sequence[float], embedding: float = 0.0, loss: float = 0.0) -> tuple[int, ...]:
    """Return the number of layers per stage, in model order; every stage but the first and the last has a layer.

    The largest work of a rank is the smallest possible (of a stage, for different layers on more than two stages per
    rank or in a loop), and the work of the other ranks is as even as single layers make it.

    Args:
        work: work of every layer, in any unit.
        embedding, loss: work of the first stage and of the last one besides their layers.

    Raises:
        UserError: for fewer layers than inner stages.
    """
    least = least_layers(placement)
    if len(work) < sum(least):
        raise UserError(
            f"{len(work)} layers with embedding and loss do not fill {placement.num_stages} pipeline stages; use "
            f"at least {sum(least)} layers or fewer stages"
        )
    mean = sum(work) / len(work) if work else 0.0
    if all(abs(each - mean) <= ROUNDING * mean for each in work):
        return _poured(placement, len(work), mean, embedding, loss)
    p = placement.num_ranks
    on, is_vee = (placement, True) if placement == Placement.vee(p) else (Placement.linear(placement.num_stages), False)
    start = _evened(on, _poured(on, len(work), mean, embedding, loss), work, embedding, loss)
    found = _smallest(_Reachable(work, embedding, loss, on.num_ranks, is_vee), start)
    return _evened(placement, found, work, embedding, loss)


def even(placement: Placement, num_layers: int) -> tuple[int, ...]:
    """Return Megatron's default: equally many layers per stage.

    Where the layers do not divide evenly, the embedding and the output layer with the loss count as one layer each, as
    with ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split``.

    Raises:
        UserError: as ``cut``.
    """
    each, rest = divmod(num_layers, placement.num_stages)
    return cut(placement, (1.0,) * num_layers, 1.0, 1.0) if rest or not each else (each,) * placement.num_stages


def least_layers(placement: Placement) -> tuple[int, ...]:
    """Return the fewest layers per stage: the first and the last stage may have none."""
    last = placement.num_stages - 1
    return tuple(int(0 < stage < last) for stage in range(last + 1))


def transfers(layout: Sequence[int], least: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every layout in which one stage has a layer less and another one more, neighbouring stages first.

    Between neighbours, only their border moves; otherwise all borders between the two stages move.
    """
    for distance in range(1, len(layout)):
        for low in range(len(layout) - distance):
            for source, target in ((low, low + distance), (low + distance, low)):
                if layout[source] > least[source]:
                    other = list(layout)
                    other[source] -= 1
                    other[target] += 1
                    yield tuple(other)


def _poured(placement: Placement, num_layers: int, each: float, embedding: float, loss: float) -> tuple[int, ...]:
    """Divide equal layers: first among ranks, of equals to the first one, then among each rank's stages."""
    counts = list(least_layers(placement))
    of_stage = [each * count for count in counts]
    of_stage[0] += embedding
    of_stage[-1] += loss
    of_rank = [sum(of_stage[s] for s in placement.stages_of(rank)) for rank in range(placement.num_ranks)]
    # Alternate which of a rank's stages is larger, so that neighbouring stages have about the same size.
    orders = [placement.stages_of(rank)[:: 1 if rank % 2 else -1] for rank in range(placement.num_ranks)]
    for _ in range(num_layers - sum(counts)):
        rank = _first_least(of_rank)
        stage = orders[rank][_first_least([of_stage[s] for s in orders[rank]])]
        counts[stage] += 1
        of_stage[stage] += each
        of_rank[rank] += each
    return tuple(counts)


def _first_least(amounts: Sequence[float]) -> int:
    """Return the place of the first of the smallest amounts, which may differ by rounding."""
    bound = min(amounts)
    bound += ROUNDING * abs(bound)
    return next(place for place, amount in enumerate(amounts) if amount <= bound)


def _smallest(search: _Reachable, layout: tuple[int, ...]) -> tuple[int, ...]:
    """Return a layout with the smallest possible largest work, starting from any.

    After every bisection, a bound just below the best layout is tried: if that fails, the best is the smallest.
    """
    low = search.mean
    while (found := search.within(search.most(layout) * (1 - 2 * ROUNDING))) is not None:
        layout = found
        middle = (low + search.most(layout)) / 2
        if (found := search.within(middle)) is None:
            low = middle
        else:
            layout = found
    return layout


class _Reachable:
    """Which ways to cut the layers keep every rank within a bound.

    A state is the number of layers taken from the front and from the back. ``_reach`` maps the number from the front
    to a bit set of the numbers from the back.
    """

    def __init__(self, work: Sequence[float], embedding: float, loss: float, num_ranks: int, is_vee: bool) -> None:
        self._work, self._embedding, self._loss = work, embedding, loss
        self._num_ranks, self._is_vee = num_ranks, is_vee
        self._sums = [0.0, *accumulate(work)]
        n = len(work)
        # By number of layers: their work from every place at the back, sorted, and the sets of the first few of these.
        self._from_back: list[tuple[list[float], list[int]]] = []
        for count in range(n + 1 if is_vee else 1):
            rows = sorted((self._back(at, count), at) for at in range(n - count + 1))
            masks = [0, *accumulate((1 << at for _, at in rows), int.__or__)]
            self._from_back.append(([row[0] for row in rows], masks))

    @property
    def mean(self) -> float:
        """The mean work of a rank, which is a lower bound."""
        return (self._sums[-1] + self._embedding + self._loss) / self._num_ranks

    def most(self, layout: Sequence[int]) -> float:
        ends = [0, *accumulate(layout)]
        stages = [self._sums[b] - self._sums[a] for a, b in pairwise(ends)]
        stages[0] += self._embedding
        stages[-1] += self._loss
        back = stages[: self._num_ranks - 1 : -1] if self._is_vee else [0.0] * self._num_ranks
        return max(map(sum, zip(stages, back, strict=False)))

    def within(self, bound: float) -> tuple[int, ...] | None:
        """Return a layout in which no rank has more work than ``bound``; None if there is none."""
        reach: list[dict[int, int]] = [{0: 1}]
        for rank in range(self._num_ranks):
            following: dict[int, int] = defaultdict(int)
            for front, backs in reach[-1].items():
                for count, back_count, fits in self._pieces(rank, front, bound):
                    if moved := (backs & fits) << back_count:
                        following[front + count] |= moved
            reach.append(self._still_possible(rank + 1, following, bound))
        n = len(self._work)
        ends = [(front, n - front) for front, backs in reach[-1].items() if backs >> (n - front) & 1]
        return self._traced(reach, ends[0], bound) if ends else None

    def _pieces(self, rank: int, front: int, bound: float) -> Iterator[tuple[int, int, int]]:
        """Yield what the rank may take after ``front`` layers: numbers of layers from the front and from the back, and
        for which numbers already taken from the back this is within the bound.
        """
        first, last = rank == 0, rank == (0 if self._is_vee else self._num_ranks - 1)
        rest = bound * (1 + ROUNDING) - (self._embedding if first else 0.0) - (self._loss if last else 0.0)
        for count in range(0 if first or (last and not self._is_vee) else 1, len(self._work) - front + 1):
            left = rest - (self._sums[front + count] - self._sums[front])
            if left < 0:
                return
            for back_count in range(0 if first or not self._is_vee else 1, len(self._from_back)):
                costs, masks = self._from_back[back_count]
                fits = masks[bisect_right(costs, left)]
                if not fits:
                    break
                yield count, back_count, fits

    def _still_possible(self, num_ranks: int, states: dict[int, int], bound: float) -> dict[int, int]:
        """Drop the states that leave more to the remaining ranks than the bound, or too few layers."""
        n, remaining = len(self._work), self._num_ranks - num_ranks
        most_left, least_left = remaining * bound * (1 + ROUNDING), remaining * (2 if self._is_vee else 1)
        if remaining and not self._is_vee:
            most_left, least_left = most_left - self._loss, least_left - 1
        kept = {}
        for front, backs in states.items():
            fewest = n - bisect_right(self._sums, self._sums[front] + most_left) + 1
            mask = -1 << max(0, fewest) & (1 << max(0, n - front - least_left + 1)) - 1
            if backs & mask:
                kept[front] = backs & mask
        return kept

    def _traced(self, reach: list[dict[int, int]], end: tuple[int, int], bound: float) -> tuple[int, ...]:
        front, back = end
        fronts: list[int] = []
        backs: list[int] = []
        for rank in reversed(range(self._num_ranks)):
            before, count, back_count = next(
                (before, count, back_count)
                for before, taken in sorted(reach[rank].items(), key=itemgetter(0), reverse=True)
                for count, back_count, fits in self._pieces(rank, before, bound)
                if before + count == front and back >= back_count and (taken & fits) >> (back - back_count) & 1
            )
            fronts.append(count)
            backs.append(back_count)
            front, back = before, back - back_count
        return (*reversed(fronts), *(backs if self._is_vee else ()))

    def _back(self, taken: int, count: int) -> float:
        n = len(self._work)
        return self._sums[n - taken] - self._sums[n - taken - count]


def _evened(
    placement: Placement, layout: tuple[int, ...], work: Sequence[float], embedding: float, loss: float
) -> tuple[int, ...]:
    """Move single layers between stages while this makes the most work of a rank, or the sum of squares, smaller."""
    least, sums = least_layers(placement), [0.0, *accumulate(work)]

    def unevenness(counts: Sequence[int]) -> tuple[float, float]:
        ends = [0, *accumulate(counts)]
        stages = [sums[b] - sums[a] for a, b in pairwise(ends)]
        stages[0] += embedding
        stages[-1] += loss
        ranks = [sum(stages[s] for s in placement.stages_of(rank)) for rank in range(placement.num_ranks)]
        return max(ranks), sum(each * each for each in ranks)

    return descend(layout, lambda counts: transfers(counts, least), unevenness)


def descend(
    layout: tuple[int, ...],
    moves: Callable[[tuple[int, ...]], Iterator[tuple[int, ...]]],
    cost: Callable[[tuple[int, ...]], tuple[float, float]],
) -> tuple[int, ...]:
    """Take the best move until none is better."""
    best = cost(layout)
    while True:
        value, other = min(((cost(other), other) for other in moves(layout)), default=(best, layout))
        if not is_less(value, best):
            return layout
        layout, best = other, value

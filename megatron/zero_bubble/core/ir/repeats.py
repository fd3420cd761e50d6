"""The repeated part of a schedule: in the steady state, every rank runs the same passes again, some microbatches later.

Flows treat all microbatches alike, so what is true of a schedule with a few repetitions is true of one
with many: its ``stem``, the schedule with only a few of them, is validated, lowered and proved in its place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from megatron.zero_bubble.core.ir.passes import Kind, Pass, later
from megatron.zero_bubble.core.ir.schedule import Schedule, chain_of
from megatron.zero_bubble.core.ir.vocabulary import algorithm_1, algorithm_2

_Code = tuple[int, Kind, int]
"""Stage, kind and slice of a pass."""
_WITHIN_MICROBATCHES = (chain_of, algorithm_1, algorithm_2)
"""The flows that treat all microbatches alike and connect only passes of the same microbatch."""
_MOST_TRIED = 8
"""Numbers of microbatches after which the middle of all rows repeats, and of which the extent is examined."""


@dataclass(frozen=True)
class Repeats:
    """Windows of the rows of a schedule, one directly after the other, that differ only in their microbatches.

    The boundaries of a window are a consistent cut: no pass before them depends on a pass after them.

    Attributes:
        num_microbatches: how many microbatches later the passes of the next window are.
        copies: the number of windows.
        begins: the position in each rank's row at which the first window begins.
        lengths: the number of passes of each rank in a window.
        lag: the number of windows after which a rank uses only values that the windows of other ranks produce. Some
            ranks can begin to repeat many microbatches before others.
    """

    num_microbatches: int
    copies: int
    begins: tuple[int, ...]
    lengths: tuple[int, ...]
    lag: int

    def stem(self, schedule: Schedule, copies: int) -> Schedule:
        """Return ``schedule`` with only ``copies`` windows."""
        left_out = self.copies - copies
        earlier = -left_out * self.num_microbatches
        order: list[tuple[Pass, ...]] = []
        pairs: set[Pass] = set()
        for row, begin, length in zip(schedule.order, self.begins, self.lengths, strict=True):
            end = begin + copies * length
            before, after = row[:end], row[end + left_out * length :]
            order.append((*before, *(later(p, earlier) for p in after)))
            pairs.update(schedule.pairs.intersection(before))
            pairs.update(later(p, earlier) for p in schedule.pairs.intersection(after))
        count = schedule.num_microbatches + earlier
        return replace(schedule, num_microbatches=count, order=tuple(order), pairs=frozenset(pairs))


def find_repeats(schedule: Schedule) -> Repeats | None:
    """Find the repeated part; None if there is none, or if it is less than half of the schedule.

    Takes time linear in the number of passes. Only finds repetitions in schedules that run the microbatches of every
    stage in order.
    """
    if schedule.make_flow not in _WITHIN_MICROBATCHES or not all(schedule.order):
        return None
    rows = [_Row(row, schedule.num_microbatches, schedule.pairs) for row in schedule.order]
    if not all(row.in_order for row in rows):
        return None
    lengths = range(1, schedule.num_microbatches // 4 + 1)
    candidates = (count for count in lengths if all(row.repeats(count) for row in rows))
    for num_microbatches in islice(candidates, _MOST_TRIED):
        found = _consistent(schedule, rows, num_microbatches)
        if found is not None and 2 * found.copies * num_microbatches > schedule.num_microbatches:
            return found
    return None


Fed = tuple[int, list[int], int, list[int]]
"""The rank of a code and its positions, and those of the code that feeds it, both by microbatch."""


def consistent_cut(begins: Sequence[int], fed: Sequence[Fed]) -> list[int]:
    """Return the first positions from ``begins`` on at which the ranks can stop: no pass before waits for one after.

    Microbatches run in order, so a cut is consistent if no code is ahead of the code that feeds it.
    """
    cut, changed = list(begins), True
    while changed:
        changed = False
        for rank, positions, feeder_rank, feeder in fed:
            count = bisect_left(positions, cut[rank])
            if count and (after := feeder[count - 1] + 1) > cut[feeder_rank]:
                cut[feeder_rank], changed = after, True
    return cut


class _Row:
    """The passes of a rank, as codes.

    Attributes:
        codes: the code of each pass.
        forms: the same, and whether the pass runs together with the next one.
    """

    def __init__(self, row: Sequence[Pass], num_microbatches: int, pairs: Collection[Pass] = ()) -> None:
        self._num_microbatches = num_microbatches
        known: dict[_Code, _Code] = {}  # one tuple per code, not one per pass
        self.codes = [known.setdefault((stage, kind, slice_), (stage, kind, slice_)) for stage, kind, _, slice_ in row]
        self.forms: Sequence[Hashable] = self.codes
        if pairs:
            self.forms = [(code, p in pairs) for code, p in zip(self.codes, row, strict=True)]
        self._splits = frozenset(place + 1 for place, p in enumerate(row) if p in pairs)
        self.positions: dict[_Code, list[int]] = {code: [] for code in self.codes}
        microbatches: dict[_Code, list[int]] = {code: [] for code in self.positions}
        for position, (code, p) in enumerate(zip(self.codes, row, strict=True)):
            self.positions[code].append(position)
            microbatches[code].append(p.microbatch)
        in_order = list(range(num_microbatches))
        self.in_order = all(found == in_order for found in microbatches.values())

    def whole(self, begin: int) -> int:
        """``begin``, or the position after it if a cut there would separate the passes of a pair."""
        return begin + (begin in self._splits)

    def length(self, num_microbatches: int) -> int:
        return len(self.positions) * num_microbatches

    def repeats(self, num_microbatches: int) -> bool:
        """Whether two windows in the middle of the row are equal, with all codes for all microbatches."""
        length = self.length(num_microbatches)
        begin = len(self.codes) // 2 - length
        window = self.codes[begin : begin + length]
        return self.forms[begin : begin + length] == self.forms[begin + length : begin + 2 * length] and all(
            window.count(code) == num_microbatches for code in self.positions
        )

    def stretch(self, num_microbatches: int) -> tuple[int, int]:
        """Return the longest part of the row, around its middle, in which each window equals the next."""
        codes, length = self.forms, self.length(num_microbatches)
        middle = len(codes) // 2

        def differs_before(count: int) -> bool:
            return codes[middle - count : middle] != codes[middle - count - length : middle - length]

        def differs_after(count: int) -> bool:
            return codes[middle : middle + count] != codes[middle - length : middle + count - length]

        before = bisect_left(range(middle - length + 1), True, lo=1, key=differs_before) - 1
        after = bisect_left(range(len(codes) - middle + 1), True, lo=1, key=differs_after) - 1
        return middle - before - length, middle + after


def _consistent(schedule: Schedule, rows: Sequence[_Row], num_microbatches: int) -> Repeats | None:
    """Return the windows from the first consistent cut within the repeated parts of all rows."""
    parts = [row.stretch(num_microbatches) for row in rows]
    needs = list(_needs(schedule, rows))
    fed = [(rank, rows[rank].positions[code], other, rows[other].positions[of]) for rank, code, other, of in needs]
    begins = consistent_cut([begin for begin, _ in parts], fed)
    while begins != (whole := [row.whole(begin) for row, begin in zip(rows, begins, strict=True)]):
        begins = consistent_cut(whole, fed)
    lengths = [row.length(num_microbatches) for row in rows]
    copies = min((end - begin) // length for begin, (_, end), length in zip(begins, parts, lengths, strict=True))
    if copies < 2:
        return None
    # How many more microbatches of the feeder than of the code run before the windows.
    ahead = max(
        (
            bisect_left(rows[feeder_rank].positions[feeder], begins[feeder_rank])
            - bisect_left(rows[rank].positions[code], begins[rank])
            for rank, code, feeder_rank, feeder in needs
            if rank != feeder_rank
        ),
        default=0,
    )
    return Repeats(num_microbatches, copies, tuple(begins), tuple(lengths), -(-ahead // num_microbatches))


def _needs(schedule: Schedule, rows: Sequence[_Row]) -> Iterator[tuple[int, _Code, int, _Code]]:
    """Yield each rank and code, with the rank and code of each pass that it depends on."""
    home = {code: rank for rank, row in enumerate(rows) for code in row.positions}
    middle = schedule.num_microbatches // 2
    for code, rank in home.items():
        stage, kind, slice_ = code
        for needed in schedule.dependencies(Pass(stage, kind, middle, slice_)):
            feeder = (needed.stage, needed.kind, needed.slice)
            if feeder in home:  # a pass that is missing will be noticed when the stem is validated
                yield rank, code, home[feeder], feeder

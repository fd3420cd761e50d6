"""Draw a large timeline as text: an excerpt of warm-up, steady state and cool-down, on six ranks.

Each part has one time scale, on which every pass has room for its number. A column shows the same time on all ranks.
Where the middle and last ranks start long after the first, the columns between are left out::

    warm-up
             0.0 ms         286.5 ms       573.0 ms
     rank 0 |F0- F1- F2- ~~ - F16 F17 F ~~ F31 .......|
    rank 16 |........... ~~ ....F0- F1- ~~ - F15 .....|
    rank 31 |........... ~~ ........... ~~ ....F0- B0-|
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from textwrap import fill
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.steady import find_period
from megatron.zero_bubble.core.analysis.timeline import Box, Timeline
from megatron.zero_bubble.core.ir import Pass
from megatron.zero_bubble.core.ir.passes import AND
from megatron.zero_bubble.core.render.text import CUT, cell, render_text

_MANY_RANKS, _MANY_MICROBATCHES = 16, 64
"""Sizes from which only an excerpt is drawn."""
_LONGEST = 20
"""Largest width of a pass in characters, even if short passes then lose their numbers."""
_LEAST_WIDTH = 72
"""Width of the excerpt in narrower terminals, which wrap it."""
_FINER = 0.96
"""Factor between the time scales that are tried."""
_MOST_RANGES = 6
"""Most ranges of omitted microbatches to list; for more, their number is printed."""


class _Window(NamedTuple):
    """Columns without a gap, and the time in ms at which they start."""

    start_ms: float
    columns: int


_Windows = Callable[[float], Sequence[_Window]]
"""The windows of a part, for a number of ms per column."""


def draw(timeline: Timeline, width: int) -> str:
    """Draw a small timeline whole, cut to ``width`` characters, and an excerpt of a large one."""
    schedule = timeline.schedule
    large = schedule.num_ranks >= _MANY_RANKS or schedule.num_microbatches >= _MANY_MICROBATCHES
    return _Excerpt(timeline, width).text() if large and timeline.makespan_ms > 0 else render_text(timeline, width)


class _Excerpt:
    """The drawing in progress; ``numbered`` collects the microbatches whose number is drawn."""

    def __init__(self, timeline: Timeline, width: int) -> None:
        self.timeline = timeline
        self.width = max(width, _LEAST_WIDTH)
        self.ranks = _first_middle_last([rank for rank, row in enumerate(timeline.spans) if row])
        self.margin = len(f"rank {self.ranks[-1]} |")
        self.room = self.width - self.margin - 1
        self.boxes = {rank: list(timeline.boxes(rank)) for rank in self.ranks}
        self.ends = {rank: [box.end_ms for box in boxes] for rank, boxes in self.boxes.items()}
        self.numbered: set[int] = set()

    def text(self) -> str:
        """Return the three parts, and a sentence that says what is left out."""
        starts = [self.boxes[rank][0].start_ms for rank in self.ranks[::2]]
        ends = [self.ends[rank][-1] for rank in self.ranks[::2]]
        lines = [
            *self._part("warm-up", lambda ms: _from(starts, self.room, ms)),
            "",
            *self._steady(),
            "",
            *self._part("cool-down", lambda ms: _until(ends, self.room, ms)),
            "",
            fill(self._left_out(), self.width, break_on_hyphens=False),
        ]
        return "\n".join(lines) + "\n"

    def _steady(self) -> list[str]:
        """Draw two periods, or as much of them as fits; without a period, the middle of the run."""
        period = find_period(self.timeline)
        if period is None:
            middle = self.timeline.start_ms + self.timeline.makespan_ms / 2
            title = "middle of the run (no steady state was found)"
            return self._part(title, lambda ms: [_Window(middle - self.room / 2 * ms, self.room)])
        begin, length, count = period
        of = f"{_ms(length)}, {count} microbatch{'es' if count > 1 else ''}"
        part = self._part(
            f"steady state: the same passes every {of} later",
            lambda ms: [_Window(begin, min(self.room, round(2 * length / ms)))],
            begin + length,
        )
        if _ms(begin + length) not in part[1]:
            part[0] = f"steady state: start of a period of {of}"
        return part

    def _part(self, title: str, windows_at: _Windows, *marked: float) -> list[str]:
        """Draw one part: its title, the times above the columns, and a row per rank."""
        ms = self._scale(windows_at)
        windows = windows_at(ms)
        times = " " * self.margin
        column = self.margin
        for window in windows:
            for at in (window.start_ms, *marked):
                mark = column + round((at - window.start_ms) / ms)
                if mark >= len(times) and mark + len(_ms(at)) <= self.width:
                    times = times.ljust(mark) + _ms(at) + " "
            column += window.columns + len(CUT)
        rows = (CUT.join(self._row(rank, window, ms) for window in windows) for rank in self.ranks)
        heads = (f"rank {rank} |".rjust(self.margin) for rank in self.ranks)
        return [title, times.rstrip(), *(f"{head}{row}|" for head, row in zip(heads, rows, strict=True))]

    def _scale(self, windows_at: _Windows) -> float:
        """Return the most ms per column at which all passes that lie in the windows have room for their labels."""
        longest = max(box.end_ms - box.start_ms for boxes in self.boxes.values() for box in boxes)
        ms = longest / 3
        while ms * _LONGEST > longest and not all(self._fit(window, ms) for window in windows_at(ms)):
            ms *= _FINER
        return ms

    def _fit(self, window: _Window, ms: float) -> bool:
        end = window.start_ms + window.columns * ms
        return all(
            (box.end_ms - box.start_ms) // ms > len(self._label(box.works))
            for rank in self.ranks
            for box in self._inside(rank, window.start_ms, end)
            if box.start_ms >= window.start_ms and box.end_ms <= end
        )

    def _inside(self, rank: int, start_ms: float, end_ms: float) -> Iterator[Box]:
        boxes = self.boxes[rank]
        for position in range(bisect_right(self.ends[rank], start_ms), len(boxes)):
            if boxes[position].start_ms >= end_ms:
                return
            yield boxes[position]

    def _row(self, rank: int, window: _Window, ms: float) -> str:
        """Draw the columns of one window; a pass that began before it starts with a dash."""
        row = ""
        for works, start_ms, end_ms in self._inside(rank, window.start_ms, window.start_ms + window.columns * ms):
            first, last = (round((at - window.start_ms) / ms) for at in (start_ms, end_ms))
            begin, end = max(first, len(row)), min(last, window.columns)
            kind = "-" if first < 0 else self._label(works[:1]).rstrip("0123456789.")
            label = f"{'-' if first < 0 else ''}{self._label(works)}"
            # A pass that goes on after the window has no blank at its end.
            drawn = cell(label, kind, end - begin + (last > end))[: max(0, end - begin)]
            if label in drawn:
                self.numbered.update(p.microbatch for p in works)
            row = row.ljust(begin, ".") + drawn
        return row.ljust(window.columns, ".")

    def _label(self, works: Iterable[Pass]) -> str:
        return AND.join(map(self._of_pass, works))

    def _of_pass(self, p: Pass) -> str:
        """Return kind and microbatch, in lower case for the second stage of two; with more stages, the whole name."""
        placement = self.timeline.schedule.placement
        stages = placement.stages_of(placement.stage_to_rank[p.stage])
        text = str(p)
        if len(stages) > 2:
            return text
        text = text.removeprefix(str(p.stage))
        return text if p.stage == stages[0] else text.lower()

    def _left_out(self) -> str:
        schedule = self.timeline.schedule
        parts = []
        if ranks := _ranges(set(range(schedule.num_ranks)) - set(self.ranks)):
            parts.append(f"ranks {', '.join(ranks)}")
        if microbatches := set(range(schedule.num_microbatches)) - self.numbered:
            listed = _ranges(microbatches)
            few = f"microbatches {', '.join(listed)}"
            many = f"{len(microbatches)} of {schedule.num_microbatches} microbatches"
            parts.append(few if len(listed) <= _MOST_RANGES else many)
        cased = "Lower case: the second stage of a rank. " if schedule.num_stages == 2 * schedule.num_ranks else ""
        return f"{cased}Left out: {'; '.join(parts)}. `zero-bubble plan --format svg` draws everything."


def _first_middle_last(ranks: Sequence[int]) -> list[int]:
    """Return up to six ranks: the first two, the middle two and the last two."""
    middle = len(ranks) // 2
    return [*ranks[:2], *ranks[middle - 1 : middle + 1], *ranks[-2:]] if len(ranks) > 6 else [*ranks]


def _from(starts: Iterable[float], room: int, ms: float) -> list[_Window]:
    """Divide ``room`` columns among windows that begin at these times, less those that another window shows."""
    starts = sorted(set(starts))
    columns = (room - len(CUT) * (len(starts) - 1)) // len(starts)
    kept = starts[:1]
    for start in starts[1:]:
        if start >= kept[-1] + columns * ms:
            kept.append(start)
    return [_Window(start, columns) for start in starts] if len(kept) == len(starts) else _from(kept, room, ms)


def _until(ends: Iterable[float], room: int, ms: float) -> list[_Window]:
    """Divide ``room`` columns among windows that stop at these times."""
    reversed_ = _from([-end for end in ends], room, ms)
    return [_Window(-minus_end - columns * ms, columns) for minus_end, columns in reversed(reversed_)]


def _ranges(numbers: Iterable[int]) -> list[str]:
    """Write numbers as ranges: ``0, 1, 2, 5`` is ``0-2`` and ``5``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ["-".join(map(str, ends)) for ends in ranges]


def _ms(value: float) -> str:
    return f"{value:,.1f} ms"

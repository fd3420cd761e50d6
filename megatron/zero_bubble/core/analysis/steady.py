"""Find the steady state of a timeline: the part in which the same passes return, some microbatches later."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.timeline import Span, Timeline
from megatron.zero_bubble.core.ir import Kind

_TOLERANCE = 1e-6
"""Largest difference between a start and its repetition, in periods; sums of times are only equal up to rounding."""
_PLACES = (0.5, 0.4, 0.6, 0.3, 0.7)
"""Where to look for two equal periods in a row, in parts of the run."""


class Period(NamedTuple):
    """A time window after which every rank repeats the passes of the window, ``num_microbatches`` later."""

    start_ms: float
    length_ms: float
    num_microbatches: int


def find_period(timeline: Timeline) -> Period | None:
    """Return the shortest period whose passes all ranks run twice in a row, with equal waits; None if there is none."""
    placement = timeline.schedule.placement
    rows = [_Row(row, placement.stages_of(rank)) for rank, row in enumerate(timeline.spans)]
    return next((period for period in _candidates(timeline) if all(row.repeats(period) for row in rows)), None)


def _candidates(timeline: Timeline) -> Iterator[Period]:
    """Yield periods from an F of the first stage to a later one, those of fewer microbatches first."""
    first_rank = timeline.spans[timeline.schedule.placement.stage_to_rank[0]]
    starts = [span.start_ms for span in first_rank if (span.pass_.stage, span.pass_.kind) == (0, Kind.F)]
    middles = [bisect_left(starts, timeline.start_ms + place * timeline.makespan_ms) for place in _PLACES]
    for count in range(1, len(starts) // 2 + 1):
        for middle in middles:
            if count <= middle < len(starts):
                begin = starts[middle - count]
                yield Period(begin, starts[middle] - begin, count)


class _Row:
    """The passes of one rank, with their starts in a list of their own for bisection."""

    def __init__(self, spans: tuple[Span, ...], stages: Sequence[int]) -> None:
        self.spans = spans
        self.stages = set(stages)
        self.starts = [span.start_ms for span in spans]

    def repeats(self, period: Period) -> bool:
        """Whether the window and the next one of equal length have the same passes, with F and B of every stage.

        Warm-up repeats forwards, and interleaved schedules repeat the passes of one stage before those of the next.
        """
        begin, length, count = period
        tolerance = _TOLERANCE * length
        edges = [bisect_left(self.starts, begin + number * length - tolerance) for number in range(3)]
        window, following = self.spans[edges[0] : edges[1]], self.spans[edges[1] : edges[2]]
        forwards = {span.pass_.stage for span in window if span.pass_.kind is Kind.F}
        backwards = {span.pass_.stage for span in window if span.pass_.kind in (Kind.B, Kind.BW)}
        return (
            forwards == backwards == self.stages
            and len(window) == len(following)
            and all(
                after.pass_ == before.pass_._replace(microbatch=before.pass_.microbatch + count)
                and abs(after.start_ms - before.start_ms - length) <= tolerance
                for before, after in zip(window, following, strict=True)
            )
        )

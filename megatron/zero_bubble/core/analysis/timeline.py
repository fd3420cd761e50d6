"""Timelines: the start and end of every pass, simulated or measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Literal, NamedTuple

from megatron.zero_bubble.core.costs.lengths import Load
from megatron.zero_bubble.core.costs.messages import NO_MESSAGES, ends_of
from megatron.zero_bubble.core.ir import Op, Pass, Schedule
from megatron.zero_bubble.core.ir.ops import COMPUTE

Metric = Literal["makespan", "span"]


class Span(NamedTuple):
    """One pass with its start and end."""

    pass_: Pass
    start_ms: float
    end_ms: float


def divided(works: Sequence[Pass], start_ms: float, end_ms: float) -> Sequence[Span]:
    """Return one span per pass of an op; passes that run at the same time have equal parts of its time."""
    if len(works) == 1:
        return (Span(works[0], start_ms, end_ms),)
    edges = [start_ms + (end_ms - start_ms) * number / len(works) for number in range(len(works))]
    return tuple(map(Span, works, edges, [*edges[1:], end_ms]))


class Box(NamedTuple):
    """What a drawing shows as one: a pass, or the two passes of a pair, from start to end."""

    works: tuple[Pass, ...]
    start_ms: float
    end_ms: float


class LaneSpan(NamedTuple):
    """One op that is not a pass, with its start and end; ``op`` is text in a trace that was read from a file.

    ``issued_ms`` is the time at which the rank reached the op; None if unknown.
    """

    lane: str
    op: Op | str
    start_ms: float
    end_ms: float
    issued_ms: float | None = None


@dataclass(frozen=True)
class Timeline:
    """A simulated or measured timeline; ``spans[rank]`` has the passes of a rank in the order they ran. The passes of a
    pair (``ir.pairs``) run at the same time; their spans are the two halves of the time of the pair.

    ``peak_activation[rank]`` is in units of one microbatch's memory on that rank; ``peak_activation`` is empty if
    unknown. ``lanes[rank]`` has the timed ops of a rank that are not passes; ``lanes`` is empty if no rank has any.
    ``messages`` has the times of the messages that spans include, as ``PassCosts.messages_on``; it is empty if they
    include none. ``loads`` has the load of every microbatch; it is empty if all are alike.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    peak_activation: tuple[float, ...] = ()
    lanes: tuple[tuple[LaneSpan, ...], ...] = ()
    messages: tuple[tuple[float, float], ...] = ()
    loads: tuple[Load, ...] = ()

    @cached_property
    def timed_lanes(self) -> tuple[str, ...]:
        """The lanes on which an op that is not a pass takes time."""
        return tuple(sorted({span.lane for row in self.lanes for span in row if span.end_ms > span.start_ms}))

    @cached_property
    def start_ms(self) -> float:
        """Start of the first pass over all ranks, or of what another lane runs before it, such as a gather."""
        lanes = (span.start_ms for row in self.lanes for span in row if span.lane != COMPUTE)
        return min((*(row[0].start_ms for row in self.spans if row), *lanes), default=0.0)

    @cached_property
    def makespan_ms(self) -> float:
        """Last end minus first start over all ranks: the length of an iteration whose optimizer waits for all ranks."""
        lanes = (span.end_ms for row in self.lanes for span in row)
        return max((*(row[-1].end_ms for row in self.spans if row), *lanes), default=0.0) - self.start_ms

    @cached_property
    def span_ms(self) -> float:
        """Maximum over ranks of (end of last pass - start of first pass): the papers' cost."""
        return max((row[-1].end_ms - row[0].start_ms for row in self.spans if row), default=0.0)

    @cached_property
    def work_ms(self) -> float:
        """Computing time of the busiest rank; messages are not work."""
        return max(self.work_by_rank, default=0.0)

    @cached_property
    def mean_work_ms(self) -> float:
        """Mean computing time of the ranks."""
        return sum(self.work_by_rank) / len(self.work_by_rank) if self.work_by_rank else 0.0

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank, divided by the mean of the ranks; 1 if all have equal work."""
        return self.work_ms / self.mean_work_ms if self.mean_work_ms else 1.0

    @cached_property
    def work_by_rank(self) -> tuple[float, ...]:
        """Computing time of each rank in ms."""
        spans = (map(self.computing, row) for row in self.spans) if self.messages else self.spans
        return tuple(self._busy_ms(spans))

    @cached_property
    def busy_ms(self) -> float:
        """The longest time for which passes, with their messages, occupy a rank."""
        return max(self._busy_ms(self.spans), default=0.0)

    def _busy_ms(self, spans: Iterable[Iterable[Span]]) -> list[float]:
        passes = [sum(end - start for _, start, end in row) for row in spans]
        more = [sum(end - start for lane, _, start, end, _ in row if lane == COMPUTE) for row in self.lanes]
        return [a + b for a, b in zip_longest(passes, more, fillvalue=0.0)]

    def boxes(self, rank: int) -> Iterator[Box]:
        """Yield the passes of a rank, with the two passes of a pair in one box."""
        spans = iter(self.spans[rank])
        for p, start_ms, end_ms in spans:
            other = next(spans, None) if p in self.schedule.pairs else None
            yield Box((p,), start_ms, end_ms) if other is None else Box((p, other.pass_), start_ms, other.end_ms)

    def message_ends(self, p: Pass) -> tuple[float, float]:
        """The time in ms that the messages of ``p`` take at the start of its span, and at its end."""
        return ends_of(p, self.messages) if self.messages else NO_MESSAGES

    def computing(self, span: Span) -> Span:
        """The part of ``span`` in which its pass computes."""
        before, after = self.message_ends(span.pass_)
        return Span(span.pass_, span.start_ms + before, span.end_ms - after)

    def bubble_rate(self, metric: Metric) -> float:
        """Share of ``metric`` in which the busiest rank does not compute: (cost - work) / cost."""
        cost = self.makespan_ms if metric == "makespan" else self.span_ms
        return (cost - self.work_ms) / cost if cost > 0 else 0.0

    def idle_rate(self, metric: Metric) -> float:
        """Mean share of ``metric`` in which a rank does not compute: the bubble rate, and what the ranks with less than
        the most work idle in addition.
        """
        cost = self.makespan_ms if metric == "makespan" else self.span_ms
        return (cost - self.mean_work_ms) / cost if cost > 0 else 0.0

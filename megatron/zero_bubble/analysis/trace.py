"""What one iteration did on every rank: passes, messages and waits on one clock, in ms.

A rank posts a receive ahead of the pass that needs it, and waits for it right before that pass. What it waited for, and
for how long, tells a late input from a slow host, which the passes alone cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron.zero_bubble.analysis.timeline import LaneSpan, Span, Timeline
from megatron.zero_bubble.ir import Pass, Placement, Schedule


class Sent(NamedTuple):
    """A value of ``producer`` was handed to the transport, which takes it to ``target`` while the rank goes on."""

    producer: Pass
    target: int
    at_ms: float


class Received(NamedTuple):
    """A value of ``producer`` was expected from ``posted_ms`` on, and the rank stood still for it from
    ``awaited_ms`` to ``arrived_ms``: no time at all where it was there already.
    """

    producer: Pass
    source: int
    posted_ms: float
    awaited_ms: float
    arrived_ms: float


class Settled(NamedTuple):
    """The rank waited until ``target`` had a value of ``producer``, to release its buffer."""

    producer: Pass
    target: int
    start_ms: float
    end_ms: float


class Validated(NamedTuple):
    """The rank waited to learn whether the optimizer step before was right."""

    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class RankTrace:
    """One rank's part, each kind of event in the order it happened.

    Attributes:
        lanes: ops that are no passes and occupy the rank, or a lane of it beside the passes.
        clock_error_ms: this rank's clock is off the first rank's by at most that much.
    """

    spans: tuple[Span, ...]
    sends: tuple[Sent, ...] = ()
    receives: tuple[Received, ...] = ()
    settles: tuple[Settled, ...] = ()
    validations: tuple[Validated, ...] = ()
    clock_error_ms: float = 0.0
    lanes: tuple[LaneSpan, ...] = ()

    def shifted(self, ms: float) -> RankTrace:
        """The same, everything ``ms`` earlier."""
        return RankTrace(
            tuple(Span(p, start - ms, end - ms) for p, start, end in self.spans),
            tuple(Sent(p, target, at - ms) for p, target, at in self.sends),
            tuple(Received(p, source, *(at - ms for at in times)) for p, source, *times in self.receives),
            tuple(Settled(p, target, start - ms, end - ms) for p, target, start, end in self.settles),
            tuple(Validated(start - ms, end - ms) for start, end in self.validations),
            self.clock_error_ms,
            tuple(LaneSpan(lane, op, start - ms, end - ms) for lane, op, start, end in self.lanes),
        )


@dataclass(frozen=True)
class Trace:
    """One iteration, measured; ``ranks[rank]`` is that rank's part."""

    timeline: Timeline
    ranks: tuple[RankTrace, ...]

    @classmethod
    def of(cls, name: str, ranks: tuple[RankTrace, ...]) -> Trace:
        """The ranks side by side, from the start of the first pass of all; ``name`` is of the schedule that ran."""
        zero = min(row.spans[0].start_ms for row in ranks if row.spans)
        ranks = tuple(row.shifted(zero) for row in ranks)
        spans = tuple(row.spans for row in ranks)
        stage_to_rank = {span.pass_.stage: rank for rank, row in enumerate(spans) for span in row}
        placement = Placement(tuple(stage_to_rank[stage] for stage in sorted(stage_to_rank)))
        order = tuple(tuple(span.pass_ for span in row) for row in spans)
        num_microbatches = 1 + max(p.microbatch for row in order for p in row)
        num_slices = 1 + max(p.slice for row in order for p in row)
        lanes = tuple(row.lanes for row in ranks) if any(row.lanes for row in ranks) else ()
        schedule = Schedule(name, placement, num_microbatches, order, num_slices)
        return cls(Timeline(schedule, spans, lanes=lanes), ranks)

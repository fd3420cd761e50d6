"""The trace of one iteration: passes, messages and waits of all ranks on one clock, in ms.

A rank posts a receive ahead of the pass that needs it, and waits for it immediately before that pass. The recorded
waits distinguish late inputs from a slow host, which the times of the passes alone cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.timeline import LaneSpan, Span, Timeline
from megatron.zero_bubble.core.costs.lengths import Load
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Flow, Pass, Placement, Schedule, Slices
from megatron.zero_bubble.core.ir.schedule import chain_of


class Sent(NamedTuple):
    """A value of ``producer`` was given to the transport, which sends it to ``target`` in the background."""

    producer: Pass
    target: int
    at_ms: float


class Received(NamedTuple):
    """The receive of a value of ``producer`` was posted at ``posted_ms``, and the rank waited for it from
    ``awaited_ms`` to ``arrived_ms``; both are equal if it had already arrived.
    """

    producer: Pass
    source: int
    posted_ms: float
    awaited_ms: float
    arrived_ms: float


class Settled(NamedTuple):
    """The rank waited until ``target`` had received a value of ``producer``, to release the send buffer."""

    producer: Pass
    target: int
    start_ms: float
    end_ms: float


class ExpertExchange(NamedTuple):
    """An all-to-all of experts during ``works``: ``part`` is its field of ``ExpertParts``."""

    works: tuple[Pass, ...]
    part: str
    start_ms: float
    end_ms: float


class ValidationWait(NamedTuple):
    """The rank waited to learn whether the previous optimizer step was valid."""

    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank, with each kind of event in order of time.

    Attributes:
        lanes: timed ops that are not passes, on the lane of the passes or on another lane.
        clock_error_ms: the largest possible offset between this rank's clock and that of the first rank.
        exchanges: the all-to-alls of experts, which are not in trace files.
    """

    spans: tuple[Span, ...]
    sends: tuple[Sent, ...] = ()
    receives: tuple[Received, ...] = ()
    settles: tuple[Settled, ...] = ()
    validations: tuple[ValidationWait, ...] = ()
    clock_error_ms: float = 0.0
    lanes: tuple[LaneSpan, ...] = ()
    exchanges: tuple[ExpertExchange, ...] = ()

    def shifted(self, ms: float) -> RankTrace:
        """Return a copy with all times ``ms`` earlier."""
        return RankTrace(
            tuple(Span(p, start - ms, end - ms) for p, start, end in self.spans),
            tuple(Sent(p, target, at - ms) for p, target, at in self.sends),
            tuple(Received(p, source, *(at - ms for at in times)) for p, source, *times in self.receives),
            tuple(Settled(p, target, start - ms, end - ms) for p, target, start, end in self.settles),
            tuple(ValidationWait(start - ms, end - ms) for start, end in self.validations),
            self.clock_error_ms,
            tuple(LaneSpan(lane, op, start - ms, end - ms) for lane, op, start, end, _ in self.lanes),
            tuple(ExpertExchange(works, part, start - ms, end - ms) for works, part, start, end in self.exchanges),
        )


@dataclass(frozen=True)
class Trace:
    """One measured iteration; ``ranks[rank]`` is the trace of a rank."""

    timeline: Timeline
    ranks: tuple[RankTrace, ...]

    def running(self, schedule: Schedule) -> Trace:
        """Return a copy whose passes, in the same order, are those of ``schedule``."""
        return Trace(replace(self.timeline, schedule=schedule), self.ranks)

    def with_loads(self, loads: tuple[Load, ...]) -> Trace:
        """Return a copy whose microbatches have ``loads``.

        Raises:
            UserError: for another number of microbatches.
        """
        number = self.timeline.schedule.num_microbatches
        if loads and len(loads) != number:
            raise UserError(f"an iteration must have one load per microbatch; got {len(loads)} for {number}")
        return Trace(replace(self.timeline, loads=loads), self.ranks)

    @classmethod
    def of(
        cls,
        name: str,
        ranks: tuple[RankTrace, ...],
        slices: Slices | None = None,
        make_flow: Callable[[Schedule], Flow] = chain_of,
        pairs: frozenset[Pass] = frozenset(),
    ) -> Trace:
        """Combine the ranks, with time 0 at the start of the first pass.

        Args:
            name: the name of the schedule.
            slices: the cuts of the sequence; even ones if not given.
            make_flow: makes the flow of the schedule.
            pairs: the forwards that ran together with the next pass of their rank.
        """
        zero = min(row.spans[0].start_ms for row in ranks if row.spans)
        ranks = tuple(row.shifted(zero) for row in ranks)
        spans = tuple(row.spans for row in ranks)
        stage_to_rank = {span.pass_.stage: rank for rank, row in enumerate(spans) for span in row}
        placement = Placement(tuple(stage_to_rank[stage] for stage in sorted(stage_to_rank)))
        order = tuple(tuple(span.pass_ for span in row) for row in spans)
        num_microbatches = 1 + max(p.microbatch for row in order for p in row)
        num_slices = 1 + max(p.slice for row in order for p in row)
        lanes = tuple(tuple(map(_from_zero, row.lanes)) for row in ranks) if any(row.lanes for row in ranks) else ()
        cuts = slices or Slices.even(num_slices)
        schedule = Schedule(name, placement, num_microbatches, order, cuts, make_flow, pairs=pairs)
        return cls(Timeline(schedule, spans, lanes=lanes), ranks)


def _from_zero(span: LaneSpan) -> LaneSpan:
    """A rank takes part in the first collective, and so waits on its lane, before any rank has started a pass."""
    return span._replace(start_ms=max(0.0, span.start_ms), end_ms=max(0.0, span.end_ms))

"""Explain the difference between a measured iteration and its plan: slow passes, late receives, host gaps.

There are two views. In both, the parts add up to the whole difference, because every ms of a rank belongs to one part:

* By rank. A rank may be idle before a pass. As long as the input has not arrived, this is waiting; the part that
  exceeds the waiting in the plan is *late*. The rest of the idle time is the *host* gap: the input is present, but
  nothing runs. In the plan, this is the time that messages take (``message_ms``). The pass is *slow* by the time that
  it takes beyond its plan. The *end* is the time after the last pass, in which only other ranks run.
* Along the measured critical chain, from the last pass back to the first. Each pass follows the previous one on its
  rank, or the one whose output it had to wait for; this chain determines the length of the iteration. Idle time in the
  plan of this chain absorbs delays: *slack*, at most 0.

All figures are in ms, measured minus planned; negative figures are gains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.timeline import Span, Timeline
from megatron.zero_bubble.core.analysis.trace import Trace
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Compute, Pass


class PassDifference(NamedTuple):
    """A pass on its rank, and the idle time before it.

    Attributes:
        waits_for: the pass of another rank whose output it needs, if any.
        waited_ms: measured time for which the rank waited for that output.
        late_ms: ``waited_ms`` minus the idle time before this pass in the plan.
    """

    pass_: Pass
    waits_for: Pass | None
    waited_ms: float
    slow_ms: float
    late_ms: float
    host_ms: float


@dataclass(frozen=True)
class RankDifference:
    """The difference on one rank; ``slow_ms + idle_ms`` is the difference of the makespans.

    Attributes:
        end_ms: idle time after its last pass, measured minus planned.
    """

    steps: tuple[PassDifference, ...]
    end_ms: float

    @cached_property
    def slow_ms(self) -> float:
        return sum(step.slow_ms for step in self.steps)

    @cached_property
    def late_ms(self) -> float:
        return sum(step.late_ms for step in self.steps)

    @cached_property
    def host_ms(self) -> float:
        return sum(step.host_ms for step in self.steps)

    @property
    def idle_ms(self) -> float:
        """The difference of its idle times over the whole makespan."""
        return self.late_ms + self.host_ms + self.end_ms


class Link(NamedTuple):
    """A pass of the critical chain, and its delay after the previous pass of the chain.

    Attributes:
        after: the previous pass of the chain; None for the first.
        transfer_ms: time from the end of ``after`` to the arrival of its output, minus the planned transfer time.
        host_ms: time from that arrival to the start of the pass, minus the planned time of messages.
    """

    pass_: Pass
    rank: int
    after: Pass | None
    slow_ms: float
    transfer_ms: float
    host_ms: float
    slack_ms: float


@dataclass(frozen=True)
class Deviation:
    """A measured iteration compared with its plan.

    Attributes:
        chain: the measured critical chain, first to last.
        end_slack_ms: planned end of the chain's last pass minus the planned makespan; below 0 if another pass ends last
            in the plan.
    """

    ranks: tuple[RankDifference, ...]
    chain: tuple[Link, ...]
    end_slack_ms: float

    @cached_property
    def makespan_ms(self) -> float:
        """The difference of the makespans, as the sum of the parts of the chain."""
        return self.slow_ms + self.transfer_ms + self.host_ms + self.slack_ms

    @cached_property
    def slow_ms(self) -> float:
        return sum(link.slow_ms for link in self.chain)

    @cached_property
    def transfer_ms(self) -> float:
        return sum(link.transfer_ms for link in self.chain)

    @cached_property
    def host_ms(self) -> float:
        return sum(link.host_ms for link in self.chain)

    @cached_property
    def slack_ms(self) -> float:
        return self.end_slack_ms + sum(link.slack_ms for link in self.chain)


@dataclass(frozen=True)
class ComparedIteration:
    """An iteration and its plan, for drawing.

    Attributes:
        iteration: the number of the iteration in the run.
        planned: the simulation of the measured order with ``costs``.
        memory: memory of a microbatch on each stage, in bytes; None if unknown.
    """

    iteration: int
    planned: Timeline
    measured: Trace
    costs: PassCosts
    memory: PassMemory | None = None

    @cached_property
    def difference(self) -> Deviation:
        return explain(self.planned, self.measured, self.costs)


def explain(planned: Timeline, measured: Trace, costs: PassCosts) -> Deviation:
    """Compute the difference between a plan and an iteration of the same schedule.

    Args:
        planned: the simulation of the measured schedule with ``costs``.

    Raises:
        UserError: when passes or their order differ.
    """
    if planned.schedule.order != measured.timeline.schedule.order:
        raise UserError(
            f"a plan and an iteration must have the same order of passes; got plan {planned.schedule.name!r} for "
            f"iteration {measured.timeline.schedule.name!r}; simulate the measured order"
        )
    both = _Both(planned, measured, costs)
    return Deviation(
        tuple(both.rank(rank) for rank in range(len(planned.spans))),
        tuple(reversed(list(both.chain()))),
        both.end_slack_ms,
    )


class _Place(NamedTuple):
    """One pass in both timelines, with times relative to their starts, the previous pass on the rank, and the planned
    times of messages before and after the pass, which are not part of its spans.
    """

    planned: Span
    measured: Span
    before: Pass | None
    rank: int
    messages: tuple[float, float]


class _Input(NamedTuple):
    """The input of a pass from another rank, and the start and end of the rank's wait for it."""

    producer: Pass
    awaited_ms: float
    arrived_ms: float


class _Both:
    def __init__(self, planned: Timeline, measured: Trace, costs: PassCosts) -> None:
        self._planned, self._measured, self._costs = planned, measured.timeline, costs
        self._received = [{r.producer: r for r in row.receives} for row in measured.ranks]
        self._places: dict[Pass, _Place] = {}
        for rank, rows in enumerate(zip(planned.spans, measured.timeline.spans, strict=True)):
            before = None
            for due, ran in zip(*rows, strict=True):
                p = due.pass_
                spans = _from(planned.computing(due), planned), _from(ran, measured.timeline)
                self._places[p] = _Place(*spans, before, rank, planned.message_ends(p))
                before = p

    def rank(self, rank: int) -> RankDifference:
        steps = tuple(self._step(self._places[span.pass_]) for span in self._planned.spans[rank])
        last = self._places[steps[-1].pass_] if steps else None
        planned_end, measured_end = (last.planned.end_ms, last.measured.end_ms) if last else (0.0, 0.0)
        tails = self._planned.makespan_ms - planned_end, self._measured.makespan_ms - measured_end
        return RankDifference(steps, tails[1] - tails[0])

    def _step(self, place: _Place) -> PassDifference:
        planned_free, measured_free = self._free(place)
        needs = self._input(place)
        waited = needs.arrived_ms - needs.awaited_ms if needs else 0.0
        due, ran, messages = place.planned, place.measured, self._messages_ms(place, place.before)
        return PassDifference(
            ran.pass_,
            needs.producer if needs else None,
            waited,
            _length(ran) - _length(due),
            waited - (due.start_ms - planned_free - messages),
            ran.start_ms - measured_free - waited - messages,
        )

    def chain(self) -> Iterator[Link]:
        """Yield the links of the critical chain, last to first."""
        place: _Place | None = self._last
        while place is not None:
            link = self._link(place)
            yield link
            place = None if link.after is None else self._places[link.after]

    @property
    def end_slack_ms(self) -> float:
        return self._last.planned.end_ms - self._planned.makespan_ms

    @property
    def _last(self) -> _Place:
        return max(self._places.values(), key=lambda place: place.measured.end_ms)

    def _link(self, place: _Place) -> Link:
        planned_free, measured_free = self._free(place)
        needs = self._input(place)
        after, transfer = place.before, 0.0
        comm = 0.0
        if needs is not None:
            producer = self._places[needs.producer]
            comm = self._transfer_ms(producer, place)
            if producer.measured.end_ms + comm > measured_free:
                after = needs.producer
                planned_free, measured_free = producer.planned.end_ms, producer.measured.end_ms
                transfer = needs.arrived_ms - measured_free - comm
            else:
                transfer, comm = needs.arrived_ms - needs.awaited_ms, 0.0
        due, ran, messages = place.planned, place.measured, self._messages_ms(place, after)
        return Link(
            ran.pass_,
            place.rank,
            after,
            _length(ran) - _length(due),
            transfer,
            ran.start_ms - measured_free - comm - transfer - messages,
            -(due.start_ms - planned_free - comm - messages),
        )

    def _free(self, place: _Place) -> tuple[float, float]:
        """Return the planned and the measured end of the previous pass on the rank."""
        if place.before is None:
            return 0.0, 0.0
        before = self._places[place.before]
        return before.planned.end_ms, before.measured.end_ms

    def _messages_ms(self, place: _Place, after: Pass | None) -> float:
        """Return the planned time of messages between ``after`` and the pass of ``place``."""
        return place.messages[0] + (0.0 if after is None else self._places[after].messages[1])

    def _input(self, place: _Place) -> _Input | None:
        """Return the input of a pass from another rank, the last one if there are several."""
        producers = self._planned.schedule.dependencies(place.measured.pass_)
        inputs = (self._input_from(self._places[p], place) for p in producers if self._places[p].rank != place.rank)
        return max(inputs, key=lambda given: given.arrived_ms, default=None)

    def _input_from(self, source: _Place, place: _Place) -> _Input:
        """Return the recorded input of a pass; without a record, it arrives after the planned transfer time."""
        producer = source.measured.pass_
        free, start = self._free(place)[1], place.measured.start_ms
        received = self._received[place.rank].get(producer)
        if received is not None:
            # The first wait of a rank may begin before time 0, the start of the first pass over all ranks.
            awaited, arrived = (max(free, at - self._measured.start_ms) for at in received[3:])
            return _Input(producer, awaited, arrived)
        here = source.measured.end_ms + self._transfer_ms(source, place)
        return _Input(producer, free, max(free, min(start, here)))

    def _transfer_ms(self, source: _Place, place: _Place) -> float:
        """Return the planned time from the end of a pass to the arrival of its output on another rank."""
        op = Compute(place.measured.pass_)
        return self._costs.comm(source.rank, place.rank) + op.arrival_ms(self._costs, source.measured.pass_)


def _from(span: Span, timeline: Timeline) -> Span:
    return Span(span.pass_, span.start_ms - timeline.start_ms, span.end_ms - timeline.start_ms)


def _length(span: Span) -> float:
    return span.end_ms - span.start_ms

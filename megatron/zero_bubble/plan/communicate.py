"""Lower a schedule to ops: where to send, when to post a receive, when a send buffer is free again.

Three rules, each linear in the number of passes:

* A pass whose consumer lives on another rank is followed by its ``Send``.
* A ``Recv`` is posted one pass ahead of the pass that needs it, so that the transfer runs under that pass. Messages of
  a channel arrive in the order they were sent, so what was sent earlier on the channel is posted first, whatever the
  order of use.
* A send buffer is released where its arrival is already implied by a message that came back (its sender had consumed
  ours before), so that ``Settle`` does not wait; what never comes back settles at the end, or earlier when
  ``max_in_flight`` bounds the buffers of a channel (an evaluation sends one way only).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.zero_bubble.errors import PlanError
from megatron.zero_bubble.ir import Kind, Pass, Schedule
from megatron.zero_bubble.plan.ops import Compute, Message, Op, Plan, Recv, Send, Settle
from megatron.zero_bubble.plan.prove import prove


def lower(schedule: Schedule, max_in_flight: int | None = None) -> Plan:
    """Turn a valid schedule into the ops of every rank, and prove that they cannot deadlock.

    Args:
        schedule: any schedule that ``analysis.validate`` accepts.
        max_in_flight: at most this many unsettled sends a channel; None where returning messages bound them.

    Raises:
        PlanError: when the ranks would wait for each other, with each rank's position.
    """
    routes = _Routes(schedule)
    ops = tuple(tuple(_RankOps(routes, rank, max_in_flight).write()) for rank in range(schedule.num_ranks))
    plan = Plan(schedule, ops)
    prove(plan)
    return plan


def lower_forward_only(schedule: Schedule) -> Plan:
    """The plan of an evaluation, which may send one way only: nothing comes back to tell when a buffer is free, so a
    channel gets as few of them as the proof allows.
    """
    forwards = schedule.forward_only()
    for most in (2, schedule.num_ranks + 1, 2 * schedule.num_ranks + 1):
        try:
            return lower(forwards, most)
        except PlanError:
            continue
    return lower(forwards)


@dataclass(slots=True)
class _Leg:
    """A message's place in its channel, and how many of the opposite channel's its sender had consumed by then."""

    message: Message
    place: int
    acknowledged: int = 0


class _Step(NamedTuple):
    """A pass, the messages it waits for, and the one it sends."""

    work: Pass
    inputs: tuple[_Leg, ...]
    output: _Leg | None


class _Routes:
    """Who sends what to whom: every rank's steps, and every channel in the order of its sender."""

    def __init__(self, schedule: Schedule) -> None:
        self.channels: dict[tuple[int, int], list[Message]] = {}
        legs: dict[Pass, _Leg] = {}
        for message in _messages(schedule):
            channel = self.channels.setdefault(message.channel, [])
            legs[message.producer] = _Leg(message, len(channel))
            channel.append(message)
        self.steps = [list(_steps(schedule, row, legs)) for row in schedule.order]
        for row in self.steps:
            _acknowledge(row)


def _messages(schedule: Schedule) -> Iterator[Message]:
    """The outputs that leave their rank, those of one rank in the order of its passes."""
    stage_to_rank, last = schedule.placement.stage_to_rank, schedule.num_stages - 1
    for source, row in enumerate(schedule.order):
        for p in row:
            if p.kind is Kind.W:
                continue
            consumer = p.stage + 1 if p.kind is Kind.F else p.stage - 1
            if 0 <= consumer <= last and stage_to_rank[consumer] != source:
                yield Message(p, source, stage_to_rank[consumer])


def _steps(schedule: Schedule, row: tuple[Pass, ...], legs: dict[Pass, _Leg]) -> Iterator[_Step]:
    for p in row:
        if p.kind is Kind.W:
            yield _Step(p, (), None)
        else:
            inputs = [legs[d] for d in schedule.dependencies(p) if d.stage != p.stage and d in legs]
            yield _Step(p, tuple(inputs), legs.get(p))


def _acknowledge(row: list[_Step]) -> None:
    """Note with every message that a rank sends what it has consumed of the other direction."""
    arrived: dict[int, int] = {}
    for step in row:
        for leg in step.inputs:
            source = leg.message.source
            arrived[source] = max(arrived.get(source, 0), leg.place + 1)
        if step.output is not None:
            step.output.acknowledged = arrived.get(step.output.message.target, 0)


class _RankOps:
    """Writes the ops of one rank; the three rules of this module are its three methods."""

    def __init__(self, routes: _Routes, rank: int, max_in_flight: int | None) -> None:
        self._routes = routes
        self._rank = rank
        self._max_in_flight = max_in_flight
        self._posted = {channel: 0 for channel in routes.channels if channel[1] == rank}
        self._sent = {channel: 0 for channel in routes.channels if channel[0] == rank}
        self._settled = dict.fromkeys(self._sent, 0)

    def write(self) -> Iterator[Op]:
        steps = self._routes.steps[self._rank]
        for step, following in zip(steps, (*steps[1:], None), strict=True):
            if step.inputs:
                yield from self._post(step)
            if following is not None and following.inputs:
                yield from self._post(following)
            yield Compute(step.work)
            if step.output is not None:
                yield from self._send(step.output.message)  # another rank waits for it; nobody waits for what settles
            if step.inputs:
                yield from self._settle_acknowledged(step)
        for channel, count in self._sent.items():
            yield from self._settle(channel, count)

    def _post(self, step: _Step) -> Iterator[Op]:
        for leg in step.inputs:
            name = leg.message.channel
            for place in range(self._posted[name], leg.place + 1):
                yield Recv(self._routes.channels[name][place])
            self._posted[name] = max(self._posted[name], leg.place + 1)

    def _send(self, message: Message) -> Iterator[Op]:
        if self._max_in_flight is not None:
            yield from self._settle(message.channel, self._sent[message.channel] + 1 - self._max_in_flight)
        yield Send(message)
        self._sent[message.channel] += 1

    def _settle_acknowledged(self, step: _Step) -> Iterator[Op]:
        for leg in step.inputs:
            back = (self._rank, leg.message.source)
            if back in self._settled:
                yield from self._settle(back, min(leg.acknowledged, self._sent[back]))

    def _settle(self, channel: tuple[int, int], count: int) -> Iterator[Op]:
        while self._settled[channel] < count:
            yield Settle(self._routes.channels[channel][self._settled[channel]])
            self._settled[channel] += 1

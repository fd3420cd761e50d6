"""Insert communication: where to send a value, when to post its receive, and when to release its send buffer.

Three rules, each linear in the number of passes:

* A pass that produces a value for another rank is followed by a ``Send``.
* A ``Recv`` is posted one pass ahead of the pass that needs it, so that the transfer overlaps the previous pass.
  Messages of a channel arrive in the order in which they are sent, so receives are posted in that order, whatever the
  order of use.
* A send buffer is released after a message from the other direction that implies its arrival (the sender of that
  message had already consumed ours), so that ``Settle`` does not wait. Without such a message, a buffer is released at
  the end, or earlier if ``max_in_flight`` limits the buffers of a channel (an evaluation sends in one direction only).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.zero_bubble.ir import Effects, Message, Op, Plan, Recv, Send, Settle, Value


def communicate(plan: Plan, max_in_flight: int | None = None) -> Plan:
    """A lowering pass: add the ops that move values between ranks, for values that no other op moves.

    Args:
        max_in_flight: the largest number of unsettled sends per channel; None if returning messages limit it.
    """
    routes = _Routes(plan)
    ops = tuple(tuple(_RankOps(routes, rank, max_in_flight).write()) for rank in range(len(plan.ops)))
    return replace(plan, ops=ops, has_messages=True)


@dataclass(slots=True)
class _Leg:
    """A message, its place in its channel, and how many messages of the opposite channel its sender had consumed."""

    message: Message
    place: int
    acknowledged: int = 0


class _Step(NamedTuple):
    """An op, the messages it waits for, and those that it sends."""

    op: Op
    inputs: tuple[_Leg, ...]
    outputs: tuple[_Leg, ...]


class _Routes:
    """The steps of every rank with their messages, and the messages of every channel in the order of its sender."""

    def __init__(self, plan: Plan) -> None:
        self.channels: dict[tuple[int, int], list[Message]] = {}
        sent: list[list[tuple[_Leg, ...]]] = []
        arriving: list[dict[Value, _Leg]] = [{} for _ in plan.ops]
        targets = _targets(plan)
        for rank, row in enumerate(plan.effects):
            sent.append([])
            for effects in row:
                legs = [self._leg(message) for message in _messages(effects, rank, targets)]
                for leg in legs:
                    arriving[leg.message.target][leg.message.value] = leg
                sent[rank].append(tuple(legs))
        self.steps = [
            [
                _Step(op, tuple([legs[value] for value in effects.uses if value in legs]), outputs)
                for op, effects, outputs in zip(row, declared, sends, strict=True)
            ]
            for row, declared, sends, legs in zip(plan.ops, plan.effects, sent, arriving, strict=True)
        ]
        for steps in self.steps:
            _acknowledge(steps)

    def _leg(self, message: Message) -> _Leg:
        channel = self.channels.setdefault(message.channel, [])
        channel.append(message)
        return _Leg(message, len(channel) - 1)


def _targets(plan: Plan) -> dict[Value, list[int]]:
    """For every value, the ranks that use it without an op that gives it."""
    targets: dict[Value, list[int]] = {}
    for rank, row in enumerate(plan.effects):
        own = {value for effects in row for value in effects.gives}
        for value in dict.fromkeys(value for effects in row for value in effects.uses):
            if value not in own:
                targets.setdefault(value, []).append(rank)
    return targets


def _messages(effects: Effects, source: int, targets: dict[Value, list[int]]) -> Iterator[Message]:
    """Yield the messages for values that an op gives to other ranks; every value is sent once per target."""
    for value in effects.gives:
        if isinstance(value, Value):
            yield from (Message(value, source, target) for target in targets.pop(value, ()))


def _acknowledge(row: list[_Step]) -> None:
    """Set ``acknowledged`` of every message that a rank sends: the number of messages consumed from its target."""
    arrived: dict[int, int] = {}
    for step in row:
        for leg in step.inputs:
            source = leg.message.source
            arrived[source] = max(arrived.get(source, 0), leg.place + 1)
        for leg in step.outputs:
            leg.acknowledged = arrived.get(leg.message.target, 0)


class _RankOps:
    """Write the ops of one rank; ``_post``, ``_send`` and the ``_settle`` methods implement the three rules."""

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
            yield step.op
            # Sent before settling: other ranks wait for a send, but not for a settle.
            for leg in step.outputs:
                yield from self._send(leg.message)
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

"""Insert communication: where to send a value, when to post its receive, and when to release its send buffer.

Three rules, each linear in the number of passes:

* A pass that produces a value for another rank is followed by a ``Send``.
* A ``Recv`` is posted one pass ahead of the pass that needs it, so that the transfer overlaps the previous pass; or
  ``late``, directly before that pass, so that a GPU that receives with NCCL has no receive on it that waits during the
  previous pass. Messages of a channel arrive in the order in which they are sent, so receives are posted in that order,
  whatever the order of use.
* A send buffer is released after a message from the other direction that implies its arrival (the sender of that
  message had already consumed ours), so that ``Settle`` does not wait. Without such a message, a buffer is released at
  the end, or earlier if ``max_in_flight`` limits the buffers of a channel (an evaluation sends in one direction only).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from megatron.zero_bubble.core.ir import Message, Op, Plan, Recv, Send, Settle, Value
from megatron.zero_bubble.core.plan.unroll import alike

PostReceives = Literal["early", "late"]
"""When receives are posted: one pass ahead of the pass that needs the message, or directly before it."""


@alike
def communicate(plan: Plan, max_in_flight: int | None = None, post_receives: PostReceives = "early") -> Plan:
    """A lowering pass: add the ops that move values between ranks, for values that no other op moves.

    Args:
        max_in_flight: the largest number of unsettled sends per channel; None if returning messages limit it.
        post_receives: when receives are posted.
    """
    routes, is_early = _Routes(plan), post_receives == "early"
    ops = tuple(_RankOps(routes, rank, max_in_flight, is_early).write() for rank in range(len(plan.ops)))
    return replace(plan, ops=ops, has_messages=True)


@dataclass(slots=True)
class _Leg:
    """A message, its place in its channel, and how many messages of the opposite channel its sender had consumed."""

    message: Message
    place: int
    acknowledged: int = 0


class _Row(NamedTuple):
    """The ops of a rank; for each one, the messages that it waits for, and those that it sends."""

    ops: tuple[Op, ...]
    inputs: list[tuple[_Leg, ...]]
    outputs: list[tuple[_Leg, ...]]


class _Routes:
    """The rows of every rank with their messages, and the messages of every channel in the order of its sender."""

    def __init__(self, plan: Plan) -> None:
        self.channels: dict[tuple[int, int], list[Message]] = {}
        self._arriving: list[dict[Value, _Leg]] = [{} for _ in plan.ops]
        targets = _targets(plan)
        sent = [[self._legs(effects.gives, rank, targets) for effects in row] for rank, row in enumerate(plan.effects)]
        self.rows = [
            _Row(ops, [tuple([legs[value] for value in effects.uses if value in legs]) for effects in row], outputs)
            for ops, row, outputs, legs in zip(plan.ops, plan.effects, sent, self._arriving, strict=True)
        ]
        for row in self.rows:
            _acknowledge(row)

    def _legs(self, gives: Iterable[Hashable], source: int, targets: dict[Value, list[int]]) -> tuple[_Leg, ...]:
        """The messages for values that an op gives to other ranks; every value is sent once per target."""
        legs = []
        for value in gives:
            if isinstance(value, Value):
                for target in targets.pop(value, ()):
                    message = Message(value, source, target)
                    channel = self.channels.setdefault((source, target), [])
                    leg = self._arriving[target][value] = _Leg(message, len(channel))
                    channel.append(message)
                    legs.append(leg)
        return tuple(legs)


def _targets(plan: Plan) -> dict[Value, list[int]]:
    """For every value, the ranks that use it without an op that gives it."""
    targets: dict[Value, list[int]] = {}
    for rank, row in enumerate(plan.effects):
        own = {value for effects in row for value in effects.gives}
        for value in dict.fromkeys(value for effects in row for value in effects.uses):
            if value not in own:
                targets.setdefault(value, []).append(rank)
    return targets


def _acknowledge(row: _Row) -> None:
    """Set ``acknowledged`` of every message that a rank sends: the number of messages consumed from its target."""
    arrived: dict[int, int] = {}
    for inputs, outputs in zip(row.inputs, row.outputs, strict=True):
        for leg in inputs:
            source = leg.message.source
            arrived[source] = max(arrived.get(source, 0), leg.place + 1)
        for leg in outputs:
            leg.acknowledged = arrived.get(leg.message.target, 0)


def _following(ops: tuple[Op, ...], inputs: list[tuple[_Leg, ...]]) -> list[tuple[_Leg, ...]]:
    """The messages that the next op waits for, for every op; ops that take no time are passed over."""
    found: list[tuple[_Leg, ...]] = []
    following: tuple[_Leg, ...] = ()
    for op, legs in zip(reversed(ops), reversed(inputs), strict=True):
        found.append(following)
        following = legs if op.lane is not None else following
    return found[::-1]


class _RankOps:
    """Write the ops of one rank; ``_post``, ``_send`` and the ``_settle`` methods implement the three rules."""

    def __init__(self, routes: _Routes, rank: int, max_in_flight: int | None, is_early: bool) -> None:
        self._routes = routes
        self._is_early = is_early
        self._rank = rank
        self._max_in_flight = max_in_flight
        self._posted = {channel: 0 for channel in routes.channels if channel[1] == rank}
        self._sent = {channel: 0 for channel in routes.channels if channel[0] == rank}
        self._settled = dict.fromkeys(self._sent, 0)
        self._ops: list[Op] = []

    def write(self) -> tuple[Op, ...]:
        ops, inputs, outputs = self._routes.rows[self._rank]
        for op, legs, following, sends in zip(ops, inputs, _following(ops, inputs), outputs, strict=True):
            self._post(legs)
            if self._is_early:
                self._post(following)
            self._ops.append(op)
            # Sent before settling: other ranks wait for a send, but not for a settle.
            for leg in sends:
                self._send(leg.message)
            self._settle_acknowledged(legs)
        for channel, count in self._sent.items():
            self._settle(channel, count)
        return tuple(self._ops)

    def _post(self, legs: tuple[_Leg, ...]) -> None:
        for leg in legs:
            name = leg.message.channel
            for place in range(self._posted[name], leg.place + 1):
                self._ops.append(Recv(self._routes.channels[name][place]))
            self._posted[name] = max(self._posted[name], leg.place + 1)

    def _send(self, message: Message) -> None:
        channel = message.channel
        if self._max_in_flight is not None:
            self._settle(channel, self._sent[channel] + 1 - self._max_in_flight)
        self._ops.append(Send(message))
        self._sent[channel] += 1

    def _settle_acknowledged(self, legs: tuple[_Leg, ...]) -> None:
        for leg in legs:
            back = (self._rank, leg.message.source)
            if back in self._settled:
                self._settle(back, min(leg.acknowledged, self._sent[back]))

    def _settle(self, channel: tuple[int, int], count: int) -> None:
        while self._settled[channel] < count:
            self._ops.append(Settle(self._routes.channels[channel][self._settled[channel]]))
            self._settled[channel] += 1

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


class _Routes:
    """Who sends what to whom: every message by producer, and every channel in the order of its sender."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.sent: dict[Pass, Message] = {}
        self.channels: dict[tuple[int, int], list[Message]] = {}
        for row in schedule.order:
            for p in row:
                if (message := self._output(p)) is not None:
                    self.sent[p] = message
                    self.channels.setdefault(message.channel, []).append(message)
        self.acknowledged = self._acknowledge()

    def _output(self, p: Pass) -> Message | None:
        """The message that carries the output of ``p``, if it leaves its rank."""
        if p.kind is Kind.W:
            return None
        consumer = p.stage + 1 if p.kind is Kind.F else p.stage - 1
        if not 0 <= consumer < self.schedule.num_stages:
            return None
        stage_to_rank = self.schedule.placement.stage_to_rank
        source, target = stage_to_rank[p.stage], stage_to_rank[consumer]
        return None if source == target else Message(p, source, target)

    def inputs(self, p: Pass) -> Iterator[Message]:
        """The messages that ``p`` waits for."""
        for needed in self.schedule.dependencies(p):
            if needed.stage != p.stage and needed in self.sent:
                yield self.sent[needed]

    def _acknowledge(self) -> dict[Message, int]:
        """For each message, how many of the opposite channel's its sender had consumed when it sent it."""
        acknowledged: dict[Message, int] = {}
        place = {m: i for channel in self.channels.values() for i, m in enumerate(channel)}
        for row in self.schedule.order:
            arrived: dict[tuple[int, int], int] = {}
            for p in row:
                for message in self.inputs(p):
                    arrived[message.channel] = max(arrived.get(message.channel, 0), place[message] + 1)
                if (out := self.sent.get(p)) is not None:
                    acknowledged[out] = arrived.get((out.target, out.source), 0)
        return acknowledged


class _RankOps:
    """Writes the ops of one rank; the three rules of this module are its three methods."""

    def __init__(self, routes: _Routes, rank: int, max_in_flight: int | None) -> None:
        self._routes = routes
        self._rank = rank
        self._max_in_flight = max_in_flight
        self._expected: set[Message] = set()
        self._posted = {channel: 0 for channel in routes.channels if channel[1] == rank}
        self._sent = {channel: 0 for channel in routes.channels if channel[0] == rank}
        self._settled = dict.fromkeys(self._sent, 0)

    def write(self) -> Iterator[Op]:
        row = self._routes.schedule.order[self._rank]
        for p, following in zip(row, (*row[1:], None), strict=True):
            yield from self._post(p)
            if following is not None:
                yield from self._post(following)
            yield Compute(p)
            if (out := self._routes.sent.get(p)) is not None:
                yield from self._send(out)  # another rank waits for it; nobody waits for what settles
            yield from self._settle_acknowledged(p)
        for channel, count in self._sent.items():
            yield from self._settle(channel, count)

    def _post(self, p: Pass) -> Iterator[Op]:
        for message in self._routes.inputs(p):
            channel = self._routes.channels[message.channel]
            while message not in self._expected:
                following = channel[self._posted[message.channel]]
                self._posted[message.channel] += 1
                self._expected.add(following)
                yield Recv(following)

    def _send(self, message: Message) -> Iterator[Op]:
        if self._max_in_flight is not None:
            yield from self._settle(message.channel, self._sent[message.channel] + 1 - self._max_in_flight)
        yield Send(message)
        self._sent[message.channel] += 1

    def _settle_acknowledged(self, p: Pass) -> Iterator[Op]:
        for message in self._routes.inputs(p):
            back = (self._rank, message.source)
            if back in self._settled:
                yield from self._settle(back, min(self._routes.acknowledged[message], self._sent[back]))

    def _settle(self, channel: tuple[int, int], count: int) -> Iterator[Op]:
        while self._settled[channel] < count:
            yield Settle(self._routes.channels[channel][self._settled[channel]])
            self._settled[channel] += 1

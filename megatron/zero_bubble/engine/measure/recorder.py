"""Records the events of an iteration on one rank as marks, which are converted to times after the iteration.

A mark is a device event on CUDA and a reading of the monotonic clock on the CPU. All marks are relative to an origin,
which is taken while the device is idle, between two readings of the host's clock. That clock is aligned with the other
ranks (``clocks``). Half the time between the two readings is added to the error of the alignment.

When nothing is recorded, the overhead per op is one check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron.zero_bubble.core.analysis.timeline import LaneSpan, divided
from megatron.zero_bubble.core.analysis.trace import ExpertExchange, RankTrace, Received, Sent, Settled, ValidationWait
from megatron.zero_bubble.core.ir import Message, Op, Pass, Schedule
from megatron.zero_bubble.core.ir.ops import COMPUTE
from megatron.zero_bubble.engine.measure.clocks import GroupClock, Offset
from megatron.zero_bubble.engine.platforms import Platform
from megatron.zero_bubble.engine.runtime.observer import IterationObserver


class _Origin(NamedTuple):
    """A mark and its time in ms of the first rank's host clock, with the maximum error."""

    mark: Any
    at_ms: float
    error_ms: float


class Recorder(IterationObserver):
    """Records this rank's part of an iteration, from ``start`` to ``stop``.

    Attributes:
        platform: takes and reads the marks.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self._mark = platform.mark
        self._origin: _Origin | None = None
        self._clock: GroupClock | None = None
        self._schedule: Schedule | None = None
        self._clear()

    @property
    def is_on(self) -> bool:
        return self._origin is not None

    def start(self, group: dist.ProcessGroup) -> None:
        """Begin to record an iteration. A collective call of ``group``, which aligns the clocks of its ranks."""
        self._clear()
        if self._clock is None or self._clock.group is not group:
            self._clock = GroupClock(group)
        self.platform.synchronize()
        self._origin = self._new_origin(self._clock.measure())

    def _new_origin(self, offset: Offset) -> _Origin:
        before = time.perf_counter()
        mark = self._mark()
        self.platform.synchronize()
        after = time.perf_counter()
        at_s, error_s = (before + after) / 2 - offset.seconds, (after - before) / 2 + offset.error_s
        return _Origin(mark, at_s * 1e3, error_s * 1e3)

    def stop(self) -> UnreadMarks:
        """End the recording and return its marks; only ``Marks.times`` waits for them and reads them."""
        origin, self._origin = self._origin, None
        assert origin is not None, "stop() was called without start()"
        taken = self._events(origin, self.platform.elapsed_ms)
        self._schedule = None
        self._clear()
        return taken

    def _clear(self) -> None:
        self._passes: list[tuple[tuple[Pass, ...], Any, Any]] = []
        self._sent: list[tuple[Message, Any]] = []
        self._received: list[tuple[Message, Any, Any, Any]] = []
        self._settled: list[tuple[Message, Any, Any]] = []
        self._validated: list[tuple[Any, Any]] = []
        self._exchanges: list[tuple[tuple[Pass, ...], str, Any, Any]] = []
        # Ops that run in another thread may complete later than the iteration: new tables forget them.
        self._lanes: dict[Op, tuple[Any, Any]] = {}
        self._running: dict[Op, Any] = {}
        self._posted: dict[Message, Any] = {}
        self._begun: Any = None
        self._waiting: Any = None
        self._works: tuple[Pass, ...] = ()
        self._exchanging: dict[str, Any] = {}

    def _events(self, origin: _Origin, elapsed_ms: Callable[[Any, Any], float]) -> UnreadMarks:
        return UnreadMarks(
            origin,
            elapsed_ms,
            self._passes,
            self._sent,
            self._received,
            self._settled,
            self._validated,
            [(op, *marks) for op, marks in self._lanes.items()],
            self._schedule,
            self._exchanges,
        )

    def end_iteration(self, completed: bool) -> None:
        if not completed:
            self._origin = None
            self._clear()

    def planned(self, schedule: Schedule) -> None:
        if self._origin is not None:
            self._schedule = schedule

    def begin(self, op: Op) -> None:
        if self._origin is not None:
            self._begun, self._works = self._mark(), op.works

    def end(self, op: Op) -> None:
        if self._origin is None:
            return
        if op.works:
            self._passes.append((op.works, self._begun, self._mark()))
        else:
            # If the op has started to run meanwhile, ``completed`` replaces the time in which it was issued.
            self._lanes.setdefault(op, (self._begun, self._mark()))

    def started(self, op: Op) -> None:
        if self._origin is not None:
            self._running[op] = self._mark()

    def completed(self, op: Op) -> None:
        if self._origin is not None and (begun := self._running.pop(op, None)) is not None:
            self._lanes[op] = begun, self._mark()

    def sent(self, message: Message) -> None:
        if self._origin is not None:
            self._sent.append((message, self._mark()))

    def posted(self, message: Message) -> None:
        if self._origin is not None:
            self._posted[message] = self._mark()

    def waiting(self) -> None:
        if self._origin is not None:
            self._waiting = self._mark()

    def received(self, message: Message) -> None:
        if self._origin is not None:
            self._received.append((message, self._posted.pop(message), self._waiting, self._mark()))

    def settled(self, message: Message) -> None:
        if self._origin is not None:
            self._settled.append((message, self._waiting, self._mark()))

    def validated(self, right: bool) -> None:
        if self._origin is not None:
            self._validated.append((self._waiting, self._mark()))

    def exchange_begins(self, part: str) -> None:
        """An all-to-all of experts begins within the current pass; ``part`` is its field of ``ExpertParts``."""
        if self._origin is not None:
            self._exchanging[part] = self._mark()

    def exchange_ends(self, part: str) -> None:
        """The all-to-all has ended, on the stream that waits for it."""
        if self._origin is not None and (begun := self._exchanging.pop(part, None)) is not None:
            self._exchanges.append((self._works, part, begun, self._mark()))

    def restarted(self) -> None:
        if self._origin is not None:
            self._clear()


class UnreadMarks(NamedTuple):
    """A recorded iteration of one rank with unread marks; ``schedule`` is None for Megatron's own schedules."""

    origin: _Origin
    elapsed_ms: Callable[[Any, Any], float]
    passes: list[tuple[tuple[Pass, ...], Any, Any]]
    sent: list[tuple[Message, Any]]
    received: list[tuple[Message, Any, Any, Any]]
    settled: list[tuple[Message, Any, Any]]
    validated: list[tuple[Any, Any]]
    lanes: list[tuple[Op, Any, Any]]
    schedule: Schedule | None
    exchanges: list[tuple[tuple[Pass, ...], str, Any, Any]]

    def times(self) -> RankTrace:
        """The recording in ms of the first rank's clock, which has an arbitrary zero. Waits for the device."""
        origin, elapsed = self.origin, self.elapsed_ms

        def ms(*marks: Any) -> Iterable[float]:
            return (origin.at_ms + elapsed(origin.mark, mark) for mark in marks)

        return RankTrace(
            tuple(span for works, *marks in self.passes for span in divided(works, *ms(*marks))),
            tuple(Sent(m.producer, m.target, *ms(mark)) for m, mark in self.sent),
            tuple(Received(m.producer, m.source, *ms(*marks)) for m, *marks in self.received),
            tuple(Settled(m.producer, m.target, *ms(*marks)) for m, *marks in self.settled),
            tuple(ValidationWait(*ms(*marks)) for marks in self.validated),
            origin.error_ms,
            tuple(sorted((LaneSpan(op.lane or COMPUTE, op, *ms(*marks)) for op, *marks in self.lanes), key=_start)),
            tuple(ExpertExchange(works, part, *ms(*marks)) for works, part, *marks in self.exchanges),
        )


def _start(span: LaneSpan) -> float:
    return span.start_ms

"""What a rank did in an iteration: marks taken while it runs, made into times afterwards.

A mark is a device event on CUDA and the monotonic clock on the CPU. All marks are relative to an origin, taken when the
device is idle between two readings of the host's clock; that clock is aligned with the other ranks' (``clocks``). Half
the time between the two readings adds to the alignment's error.

While nothing is recorded, a pass costs one check; the transport is watched only in iterations that are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.zero_bubble.analysis.timeline import Span
from megatron.zero_bubble.analysis.trace import RankTrace, Received, Sent, Settled, Validated
from megatron.zero_bubble.ir import Pass
from megatron.zero_bubble.measure.clocks import GroupClock, Offset
from megatron.zero_bubble.plan import Message
from megatron.zero_bubble.platforms import Platform
from megatron.zero_bubble.runtime.executor import Awaited, Channels


class _Origin(NamedTuple):
    """A mark, and when it was taken: ms of the first rank's host clock, and how far that may be off."""

    mark: Any
    at_ms: float
    error_ms: float


class Recorder:
    """Records this rank's part of an iteration while it is on; a ``PassObserver``.

    Args:
        platform: whose marks to take.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._mark = platform.mark
        self._origin: _Origin | None = None
        self._clock: GroupClock | None = None
        self._clear()

    @property
    def is_on(self) -> bool:
        return self._origin is not None

    def start(self, group: dist.ProcessGroup) -> None:
        """Begin to record an iteration; the ranks of ``group`` meet here, and align their clocks."""
        self._clear()
        if self._clock is None or self._clock.group is not group:
            self._clock = GroupClock(group)
        self._platform.synchronize()
        self._origin = self._new_origin(self._clock.measure())

    def _new_origin(self, offset: Offset) -> _Origin:
        before = time.perf_counter()
        mark = self._mark()
        self._platform.synchronize()
        after = time.perf_counter()
        at_s, error_s = (before + after) / 2 - offset.seconds, (after - before) / 2 + offset.error_s
        return _Origin(mark, at_s * 1e3, error_s * 1e3)

    def stop(self) -> Marks:
        """End the recording; the marks are read, and waited for, by ``Marks.times``."""
        origin, self._origin = self._origin, None
        assert origin is not None, "stop() belongs to a start()"
        taken = Marks(
            origin, self._platform.elapsed_ms, self._passes, self._sent, self._received, self._settled, self._validated
        )
        self._clear()
        return taken

    def _clear(self) -> None:
        """Forget what was recorded: the iteration begins, or begins anew, after an optimizer step that was wrong."""
        self._passes: list[tuple[Pass, Any, Any]] = []
        self._sent: list[tuple[Message, Any]] = []
        self._received: list[tuple[Message, Any, Any, Any]] = []
        self._settled: list[tuple[Message, Any, Any]] = []
        self._validated: list[tuple[Any, Any]] = []
        self._begun: Any = None

    # What a PassObserver is told.

    def begin(self, work: Pass) -> None:
        if self._origin is not None:
            if self._passes and work == self._passes[0][0]:
                self._clear()
            self._begun = self._mark()

    def end(self, work: Pass) -> None:
        if self._origin is not None:
            self._passes.append((work, self._begun, self._mark()))

    # What happens between the passes.

    def watch(self, transport: Channels, validate: Callable[[], bool]) -> tuple[Channels, Callable[[], bool]]:
        """The same two, recorded, for one run of a plan."""
        self._clear()

        def recorded() -> bool:
            start = self._mark()
            right = validate()
            self._validated.append((start, self._mark()))
            return right

        return _Watched(self, transport), recorded

    def sent(self, message: Message) -> None:
        self._sent.append((message, self._mark()))

    def received(self, message: Message, posted: Any, awaited: Any) -> None:
        self._received.append((message, posted, awaited, self._mark()))

    def settled(self, message: Message, start: Any) -> None:
        self._settled.append((message, start, self._mark()))

    def mark(self) -> Any:
        return self._mark()


class _Watched:
    """``Channels`` that tell the recorder."""

    def __init__(self, recorder: Recorder, transport: Channels) -> None:
        self._recorder = recorder
        self._transport = transport

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        self._transport.send(message, tensor)
        self._recorder.sent(message)

    def post(self, message: Message, buffer: torch.Tensor) -> Awaited:
        posted = self._recorder.mark()
        return _WatchedReceive(self._recorder, self._transport.post(message, buffer), message, posted)

    def settle(self, message: Message) -> None:
        start = self._recorder.mark()
        self._transport.settle(message)
        self._recorder.settled(message, start)


class _WatchedReceive:
    def __init__(self, recorder: Recorder, receive: Awaited, message: Message, posted: Any) -> None:
        self._recorder, self._receive, self._message, self._posted = recorder, receive, message, posted

    def wait(self, needed_by: object) -> torch.Tensor:
        awaited = self._recorder.mark()
        tensor = self._receive.wait(needed_by)
        self._recorder.received(self._message, self._posted, awaited)
        return tensor


class Marks(NamedTuple):
    """A recorded iteration of one rank, its marks not read yet."""

    origin: _Origin
    elapsed_ms: Callable[[Any, Any], float]
    passes: list[tuple[Pass, Any, Any]]
    sent: list[tuple[Message, Any]]
    received: list[tuple[Message, Any, Any, Any]]
    settled: list[tuple[Message, Any, Any]]
    validated: list[tuple[Any, Any]]

    def times(self) -> RankTrace:
        """Everything in ms of the first rank's clock, whose zero means nothing; waits for the device."""
        origin, elapsed = self.origin, self.elapsed_ms

        def ms(*marks: Any) -> Iterable[float]:
            return (origin.at_ms + elapsed(origin.mark, mark) for mark in marks)

        return RankTrace(
            tuple(Span(work, *ms(*marks)) for work, *marks in self.passes),
            tuple(Sent(m.producer, m.target, *ms(mark)) for m, mark in self.sent),
            tuple(Received(m.producer, m.source, *ms(*marks)) for m, *marks in self.received),
            tuple(Settled(m.producer, m.target, *ms(*marks)) for m, *marks in self.settled),
            tuple(Validated(*ms(*marks)) for marks in self.validated),
            origin.error_ms,
        )

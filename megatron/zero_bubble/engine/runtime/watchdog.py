"""Ends a rank whose GPU waits for another rank in vain, with a message that names what it waits for.

With gloo the host waits for a message or a collective, and fails when a peer does not take part. NCCL's ``Work.wait``,
and that of a result on a CUDA lane, return at once: only the compute stream waits. The host runs ahead, and stops
later, in any call that needs a result of the GPU, so that it cannot raise an error. torch's own watchdog ends the
process, but does not know passes.

Therefore two marks in the compute stream (CUDA events) enclose every wait, and a thread follows them. If a GPU has
reached the first mark of a wait and does not reach the second, its peer hangs or is gone. The marks take some
microseconds of the host per wait; nothing waits for the GPU.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from megatron.zero_bubble.core.errors import PeerError
from megatron.zero_bubble.engine.runtime.ending import end_process, report
from megatron.zero_bubble.engine.runtime.nccl import DEFAULT_TIMEOUT

_SHARE = 0.9
"""The share of the timeout that a GPU waits. The watchdogs of other process groups, which have the same timeout, would
end the process without naming a pass."""
_PERIOD_S = 1.0


class Marks(Protocol):
    """Marks in the compute stream; implemented by ``platforms.Platform``."""

    def mark(self) -> Any: ...

    def reached(self, mark: Any) -> bool: ...


class Waiting(Protocol):
    """What the compute stream waits for: a ``dist.Work`` or a ``platforms.streams.Result``."""

    def wait(self) -> Any: ...


class _Wait(NamedTuple):
    begin: Any
    end: Any
    failure: Callable[[str], PeerError]


class Watchdog:
    """Follows the waits of one GPU for its peers.

    Args:
        marks: makes and queries the marks.
        timeout: maximum time that the GPU may wait for its peers; it is given up when nine tenths of it are over. None
            is the default of torch.distributed.
        give_up: called in the watchdog's thread with the error; by default it prints the error and ends the process.
    """

    def __init__(
        self, marks: Marks, timeout: timedelta | None = None, give_up: Callable[[PeerError], None] | None = None
    ) -> None:
        self._marks = marks
        self._limit_s = _SHARE * (timeout or DEFAULT_TIMEOUT).total_seconds()
        self._give_up = give_up or _end
        self._waits: deque[_Wait] = deque()
        self._waiting_since_s: float | None = None
        self._checks = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, work: Waiting, failure: Callable[[str], PeerError]) -> Any:
        """Make the compute stream wait for ``work``, and return what it returns.

        ``failure`` makes the error from a reason. It must not refer to tensors: it is kept until the wait has ended.
        """
        begin = self._marks.mark()
        result = work.wait()
        self._waits.append(_Wait(begin, self._marks.mark(), failure))
        return result

    def check(self, now_s: float) -> PeerError | None:
        """The error if the GPU has waited too long at the time ``now_s``; called again and again, with later times."""
        while self._waits and self._marks.reached(self._waits[0].end):
            self._waits.popleft()
            self._waiting_since_s = None
        if not self._waits or not self._marks.reached(self._waits[0].begin):
            return None
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        waited_s = now_s - self._waiting_since_s
        return self._waits[0].failure(f"the GPU has waited {waited_s:.0f} s") if waited_s >= self._limit_s else None

    def paused(self) -> AbstractContextManager[object]:
        """Context in which no mark is queried, which would end the capture of a CUDA graph in another thread."""
        return self._checks

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_PERIOD_S)
        self._waits.clear()

    def _run(self) -> None:
        while not self._closed.wait(min(_PERIOD_S, self._limit_s / 10)):
            try:
                with self._checks:
                    error = self.check(time.monotonic())
            except RuntimeError:
                return  # the GPU has failed, which the main thread reports
            if error is not None:
                self._give_up(error)
                return


def _end(error: PeerError) -> None:
    report(f"rank {dist.get_rank()}: {error}")
    end_process(1)

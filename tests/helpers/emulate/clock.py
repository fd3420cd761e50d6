"""Time on an emulated rank: a logical clock, and a precise sleep."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time

from megatron.zero_bubble.core.analysis.timeline import LaneSpan, Span
from megatron.zero_bubble.core.ir import Op, Pass
from megatron.zero_bubble.core.ir.ops import COMPUTE


class VirtualClock:
    """The logical time of one rank, and the passes and other ops that it ran."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.spans: list[Span] = []
        self.lanes: list[LaneSpan] = []
        self._lane_free: dict[str, float] = {}

    def advance(self, work: Pass, ready_ms: float, duration_ms: float) -> None:
        """Run ``work`` as soon as the rank is free and its input is available."""
        start = max(self.now_ms, ready_ms)
        self.now_ms = start + duration_ms
        self.spans.append(Span(work, start, self.now_ms))

    def occupy(self, op: Op, ready_ms: float, duration_ms: float) -> float:
        """Run ``op`` as soon as its lane is free and its input is available, without blocking the rank. Return the time
        at which it ends.
        """
        assert op.lane is not None, "an op without a lane takes no time"
        start = max(self.now_ms, ready_ms, self._lane_free.get(op.lane, 0.0))
        end = self._lane_free[op.lane] = start + duration_ms
        self.lanes.append(LaneSpan(op.lane, op, start, end, self.now_ms))
        return end

    def wait(self, op: Op, ready_ms: float) -> None:
        """Run ``op``, which takes no time, on the lane of the passes: the rank waits until its input is available."""
        reached, self.now_ms = self.now_ms, max(self.now_ms, ready_ms)
        self.lanes.append(LaneSpan(COMPUTE, op, self.now_ms, self.now_ms, reached))


# time.sleep oversleeps, so the end of a pass is spun. Ranks share cores and often wake together: a rank that spins for
# long, or spins without yielding, takes the core from a rank that has a tensor to send. With 8 ranks on 2 cores, passes
# of 12.5 ms ended 0.1 ms late and took 0.29 ms of CPU with 0.5 ms of spinning and the timer slack of Linux, 0.05 ms;
# with this they end as late and take 0.07 ms.
_SPIN_S = 0.0001
_TIMER_SLACK_NS = 1000
_PR_SET_TIMERSLACK = 29


def sleep_until(deadline: float) -> None:
    """Sleep until shortly before ``deadline`` (``time.perf_counter``), then spin, yielding the core."""
    _wake_on_time(threading.get_ident())
    remaining = deadline - time.perf_counter()
    if remaining > _SPIN_S:
        time.sleep(remaining - _SPIN_S)
    while time.perf_counter() < deadline:
        os.sched_yield()


@functools.cache
def _wake_on_time(_thread: int) -> None:
    """Lower the timer slack of this thread, by which Linux may delay the end of its sleeps; elsewhere, do nothing."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, *map(ctypes.c_ulong, (_TIMER_SLACK_NS, 0, 0, 0)))

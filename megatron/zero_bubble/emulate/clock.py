"""Time on an emulated rank: a logical clock, and a precise sleep."""

from __future__ import annotations

import os
import time

from megatron.zero_bubble.analysis.timeline import LaneSpan, Span
from megatron.zero_bubble.ir import Op, Pass
from megatron.zero_bubble.ir.ops import COMPUTE


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


# time.sleep oversleeps by 0.05 to 0.3 ms, so the end of a pass is spun. Ranks share cores and often wake together: a
# rank that spins for longer, or spins without yielding, takes the core from a rank that has a tensor to send. With 8
# ranks on 2 cores, a 50 ms pass took 0.6 ms too long with 2 ms of plain spinning, 0.18 ms with none, 0.05 ms with this.
_SPIN_S = 0.0005


def sleep_until(deadline: float) -> None:
    """Sleep until shortly before ``deadline`` (``time.perf_counter``), then spin, yielding the core."""
    remaining = deadline - time.perf_counter()
    if remaining > _SPIN_S:
        time.sleep(remaining - _SPIN_S)
    while time.perf_counter() < deadline:
        os.sched_yield()

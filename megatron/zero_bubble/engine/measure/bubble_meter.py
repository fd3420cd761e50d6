"""Low-overhead measurement of the bubble: two marks per pass, and one exchange between ranks when it is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron.zero_bubble.core.analysis.bubble import Bubble, RankIteration, RankIterations, bubble_of
from megatron.zero_bubble.core.ir import Flow, Kind, Op, Pass, Schedule
from megatron.zero_bubble.core.ir.schedule import chain_of
from megatron.zero_bubble.engine.platforms import Platform
from megatron.zero_bubble.engine.runtime.observer import IterationObserver, IterationStart

_Marks = list[tuple[tuple[Pass, ...], Any, Any]]


class BubbleMeter(IterationObserver):
    """Measures the bubble of training iterations by their span.

    Each rank measures with its own clock, so ranks need not synchronize before an iteration. On CUDA a mark is a device
    event; it is read one iteration later, so that the host does not wait for it.

    Args:
        platform: takes and reads the marks.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._running: _Marks = []
        self._started: Any = None  # start of the first pass, including passes that are repeated later
        self._begun: Any = None
        self._unread: deque[tuple[Any, _Marks, bool]] = deque()
        self._iterations: list[RankIteration] = []
        self._order: tuple[Pass, ...] = ()
        self._make_flow: Callable[[Schedule], Flow] = chain_of
        self._pairs = frozenset[Pass]()
        self._times: dict[tuple[int, Kind, int], tuple[float, int]] = {}
        self._last: dict[Pass, float] | None = None
        self._varies = False

    def begin_iteration(self, start: IterationStart) -> None:
        while len(self._unread) > 1:
            self._take(*self._unread.popleft())
        self._running, self._started, self._varies = [], None, start.varies

    def planned(self, schedule: Schedule) -> None:
        self._make_flow, self._pairs = schedule.make_flow, schedule.pairs

    def end_iteration(self, completed: bool) -> None:
        if completed and self._running:
            self._unread.append((self._started, self._running, self._varies))
        self._running = []

    def read(self, group: dist.ProcessGroup) -> Bubble | None:
        """The bubble since the last ``read``, or None if there was no iteration. Waits for the device.

        A collective call of the pipeline's ``group``.
        """
        while self._unread:
            self._take(*self._unread.popleft())
        if not self._iterations:
            return None
        pass_ms = {key: total / count for key, (total, count) in self._times.items()}
        rows: list[Any] = [None] * group.size()
        pairs = self._pairs.intersection(self._order)
        own = RankIterations(tuple(self._iterations), self._order, pass_ms, self._make_flow, self._last, pairs)
        dist.all_gather_object(rows, own, group=group)
        self._iterations.clear()
        self._times.clear()
        return bubble_of(rows)

    def begin(self, op: Op) -> None:
        if op.works:
            self._begun = self._platform.mark()
            if self._started is None:
                self._started = self._begun

    def end(self, op: Op) -> None:
        if op.works:
            self._running.append((op.works, self._begun, self._platform.mark()))

    def restarted(self) -> None:
        self._running.clear()

    def _take(self, started: Any, marks: _Marks, varies: bool) -> None:
        """Add an iteration. The time of passes before a restart counts as bubble."""
        elapsed_ms = self._platform.elapsed_ms
        # The passes of a pair run at the same time: each counts as half of it.
        times = {work: elapsed_ms(start, end) / len(works) for works, start, end in marks for work in works}
        self._iterations.append(RankIteration(elapsed_ms(started, marks[-1][2]), sum(times.values())))
        self._order, self._last = tuple(times), times if varies else None
        for work, ms in times.items():
            key = (work.stage, work.kind, work.slice)
            total, count = self._times.get(key, (0.0, 0))
            self._times[key] = total + ms, count + 1

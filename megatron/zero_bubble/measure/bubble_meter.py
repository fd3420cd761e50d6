"""The bubble of every iteration, cheaply: two marks a pass, and one exchange between the ranks when somebody looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.zero_bubble.analysis.bubble import Bubble, RankIteration, RankIterations, bubble_of
from megatron.zero_bubble.ir import Kind, Pass
from megatron.zero_bubble.platforms import Platform

T = TypeVar("T")
_Marks = list[tuple[Pass, Any, Any]]


class BubbleMeter:
    """Measures the bubble by the span of the iterations that it is put around; a ``PassObserver``.

    Each rank measures by its own clock, so nobody has to meet before an iteration. A mark is an event of the device on
    CUDA; it is read one iteration later, when it is long past, so that the host does not wait.

    Args:
        platform: whose marks to take.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._running: _Marks | None = None
        self._begun: Any = None
        self._unread: deque[_Marks] = deque()
        self._iterations: list[RankIteration] = []
        self._order: tuple[Pass, ...] = ()
        self._times: dict[tuple[int, Kind], tuple[float, int]] = {}

    def around_passes(self, passes: Callable[[], T]) -> T:
        """Run the passes of one iteration, measured."""
        while len(self._unread) > 1:
            self._take(self._unread.popleft())
        self._running = []
        try:
            result = passes()
            self._unread.append(self._running)
        finally:
            self._running = None
        return result

    def read(self, group: dist.ProcessGroup) -> Bubble | None:
        """The bubble since the last ``read``, or None if there was no iteration; a collective call of the pipeline's
        ``group``. Waits for the device.
        """
        while self._unread:
            self._take(self._unread.popleft())
        if not self._iterations:
            return None
        pass_ms = {key: total / count for key, (total, count) in self._times.items()}
        rows: list[Any] = [None] * group.size()
        dist.all_gather_object(rows, RankIterations(tuple(self._iterations), self._order, pass_ms), group=group)
        self._iterations.clear()
        self._times.clear()
        return bubble_of(rows)

    # What a PassObserver is told.

    def begin(self, work: Pass) -> None:
        if self._running is not None:
            self._begun = self._platform.mark()

    def end(self, work: Pass) -> None:
        if self._running is not None:
            self._running.append((work, self._begun, self._platform.mark()))

    def _take(self, marks: _Marks) -> None:
        """Count an iteration. What ran twice, after an optimizer step that was wrong, was work the second time."""
        if not marks:
            return
        elapsed_ms = self._platform.elapsed_ms
        times = {work: elapsed_ms(start, end) for work, start, end in marks}
        self._iterations.append(RankIteration(elapsed_ms(marks[0][1], marks[-1][2]), sum(times.values())))
        self._order = tuple(times)
        for work, ms in times.items():
            total, count = self._times.get((work.stage, work.kind), (0.0, 0))
            self._times[work.stage, work.kind] = total + ms, count + 1

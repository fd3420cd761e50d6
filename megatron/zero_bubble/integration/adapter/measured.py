"""Measured iterations, for all that plan from them during the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.engine.measure.gather import gather_trace
from megatron.zero_bubble.engine.measure.recorder import Recorder
from megatron.zero_bubble.engine.runtime.observer import IterationObserver, IterationStart


class Replanner(ABC):
    """Plans from measured iterations. Its methods are called on all ranks.

    Args:
        measured: iterations per measurement, all of one size unless lengths vary.

    Attributes:
        iteration: the number of iterations so far.
    """

    def __init__(self, measured: int) -> None:
        self.iteration = 0
        self._measured = measured
        self._timelines: list[Timeline] = []

    @abstractmethod
    def begin(self, start: IterationStart) -> bool:
        """Called when an iteration begins; returns whether to measure it."""

    @abstractmethod
    def evaluate(self, timelines: list[Timeline], start: IterationStart) -> None:
        """Plan from a measurement, whose last iteration had ``start``."""

    def add(self, timeline: Timeline, start: IterationStart) -> None:
        """Add a measured iteration to the measurement, which begins again if the batch size has changed; not so if
        lengths vary, because then every iteration may have another.
        """
        if not start.varies and self._timelines and size_of(self._timelines[0].schedule) != size_of(timeline.schedule):
            self._timelines.clear()
        self._timelines.append(timeline)
        if len(self._timelines) == self._measured:
            timelines, self._timelines = self._timelines, []
            self.evaluate(timelines, start)

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """Called at the end of training."""


class Measured(IterationObserver):
    """Records the iterations that planners ask for, each of them once.

    Args:
        passes: times passes and copies; must be an observer of the same pipeline.
        planners: plan from the iterations.
    """

    def __init__(self, passes: Recorder, planners: Sequence[Replanner]) -> None:
        self._passes, self._planners = passes, planners
        self._asking: list[Replanner] = []
        self._start: IterationStart | None = None

    def begin_iteration(self, start: IterationStart) -> None:
        """Start to record if a planner asks for the iteration."""
        self._asking = [planner for planner in self._planners if planner.begin(start)]
        self._start = start
        if self._asking:
            self._passes.start(start.group)

    def end_iteration(self, completed: bool) -> None:
        start, self._start = self._start, None
        if not completed or start is None:
            return
        if self._asking:
            timeline = gather_trace("measured", self._passes.stop(), start.group).timeline
            for planner in self._asking:
                planner.add(timeline, start)
        for planner in self._planners:
            planner.iteration += 1

    def close(self) -> None:
        for planner in self._planners:
            planner.close()


def size_of(schedule: Schedule) -> tuple[int, int]:
    return schedule.num_ranks, schedule.num_microbatches

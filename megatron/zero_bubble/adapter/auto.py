"""``zb-auto`` in training: measure under a handcrafted schedule, plan in another process, switch between iterations.

One rank starts the planner, a process at the lowest priority (``planner``), so that no rank waits for it. Every rank
learns of its end in the same iteration, by a broadcast of one number, and takes the schedule from the rank that
planned. What is computed does not change with the order, so the loss curve does not either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron.zero_bubble.adapter.planner import Planner
from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.formats.costs import costs_to_json
from megatron.zero_bubble.ir import Schedule
from megatron.zero_bubble.job.source import FIRST_SCHEDULE
from megatron.zero_bubble.measure.gather import gather_trace, median_costs
from megatron.zero_bubble.measure.memory import MemoryMeter
from megatron.zero_bubble.measure.recorder import Recorder
from megatron.zero_bubble.planning.worker import Request
from megatron.zero_bubble.runtime.observer import IterationObserver, IterationStart
from megatron.zero_bubble.schedules import build


@dataclass(frozen=True)
class AutoOptions:
    """How ``zb-auto`` goes about it.

    Attributes:
        memory_limit: as ``zero-bubble plan --memory-limit``: ``1p`` is what 1F1B needs.
        placement: of the stages; it stays what it is.
        post_validation: whether optimizer steps are validated later, so that an iteration takes the span.
        warm_up: iterations before measuring.
        measured: iterations a measurement takes.
        check_every: iterations between looks at whether the pass times have drifted.
        drift: the relative change of the predicted iteration that makes a new plan worth while.
    """

    memory_limit: str = "1p"
    placement: Literal["linear", "vee"] = "linear"
    post_validation: bool = False
    warm_up: int = 2
    measured: int = 4
    check_every: int = 100
    drift: float = 0.1

    @property
    def first(self) -> str:
        """The schedule to measure under."""
        return FIRST_SCHEDULE[self.placement]


class AutoSchedule(IterationObserver):
    """The schedule of ``zb-auto``: it watches training iterations, and changes between two of them.

    Args:
        passes: times the passes; an observer of the same pipeline.
        memory: counts what microbatches keep; likewise.
        say: where the log lines go, on the rank that plans.
    """

    def __init__(self, options: AutoOptions, passes: Recorder, memory: MemoryMeter, say: Callable[[str], None]) -> None:
        self._options = options
        self._passes = passes
        self._memory = memory
        self._say = say
        self._planned: dict[tuple[int, int], Schedule] = {}  # by ranks and microbatches
        self._first: dict[tuple[int, int], Schedule] = {}
        self._costs: PassCosts | None = None
        self._hopeless: set[tuple[int, int]] = set()
        self._timelines: list[Timeline] = []
        self._iteration = 0
        self._next_measurement = options.warm_up
        self._planner: Planner | None = None
        self._planning_for = (0, 0)
        self._waiting = False
        self._start: IterationStart | None = None  # of the iteration under way, if it is measured

    def make(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """The schedule to run now."""
        size = num_ranks, num_microbatches
        if size in self._planned:
            return self._planned[size]
        if size not in self._first:
            self._first[size] = build(self._options.first, num_ranks=num_ranks, num_microbatches=num_microbatches)
        return self._first[size]

    def begin_iteration(self, start: IterationStart) -> None:
        """It may be the first of a new plan, or be measured."""
        size = start.group.size(), start.num_microbatches
        if self._waiting:
            self._switch_if_planned()
        if self._timelines and _size(self._timelines[-1].schedule) != size:
            self._timelines.clear()  # the batch has grown: a measurement is of one size
        self._plan_for(size)
        self._start = start if self._measuring() else None
        if self._start is not None:
            self._passes.start(start.group)

    def end_iteration(self, completed: bool) -> None:
        start, self._start = self._start, None
        if completed and start is not None:
            self._timelines.append(gather_trace("zb-auto", self._passes.stop(), start.group).timeline)
            if len(self._timelines) == self._options.measured:
                self._evaluate(start.group, start.num_microbatches)
        self._iteration += completed

    def close(self) -> None:
        """End the planner, if one is at work: training is over."""
        if self._planner is not None:
            self._planner.kill()
            self._planner = None

    def _measuring(self) -> bool:
        return not self._waiting and self._iteration >= self._next_measurement

    def _plan_for(self, size: tuple[int, int]) -> None:
        """A size without a plan is measured as soon as the first measurement was due."""
        if size not in self._planned and size not in self._hopeless:
            self._next_measurement = min(self._next_measurement, max(self._iteration, self._options.warm_up))

    def _evaluate(self, group: dist.ProcessGroup, num_microbatches: int) -> None:
        """After a measurement: say how the plan did, and decide, on one rank for all, whether to make a new one."""
        timelines, self._timelines = self._timelines, []
        size = group.size(), num_microbatches
        costs = median_costs(timelines)
        memory = self._memory.gather(group)
        replan = False
        if dist.get_rank() == 0:
            schedule = self.make(group.size(), num_microbatches)
            predicted = simulate(schedule, costs).makespan_ms
            measured = median(timeline.makespan_ms for timeline in timelines)
            self._say(
                f"zb-auto: iteration {self._iteration + 1}, {schedule.name}: predicted {predicted:.1f} ms from the "
                f"measured passes, measured {measured:.1f} ms"
            )
            known = size in self._planned or size in self._hopeless
            replan = self._costs is None or not known or self._drifted(schedule, costs)
            if replan:
                self._costs = costs
                options = self._options
                self._planner = Planner(
                    Request(
                        costs_to_json(costs, memory),
                        group.size(),
                        num_microbatches,
                        options.memory_limit,
                        options.placement,
                        "span" if options.post_validation else "makespan",
                    )
                )
        self._waiting = bool(_from_first_rank(int(replan)))
        self._planning_for = size
        self._next_measurement = self._iteration + self._options.check_every

    def _drifted(self, schedule: Schedule, costs: PassCosts) -> bool:
        assert self._costs is not None, "a plan was made from costs"
        before, now = (simulate(schedule, figures).makespan_ms for figures in (self._costs, costs))
        return abs(now - before) > self._options.drift * before

    def _switch_if_planned(self) -> None:
        if not _from_first_rank(int(self._planner is not None and self._planner.finished())):
            return
        self._waiting = False
        box: list[Any] = [None]
        if self._planner is not None:
            box[0], said = self._planner.result()
            self._planner = None
            self._say(f"zb-auto: iteration {self._iteration + 1}: {said}")
        dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            self._hopeless.add(self._planning_for)
        else:
            self._planned[_size(box[0])] = box[0]
            self._next_measurement = self._iteration + 1


def _size(schedule: Schedule) -> tuple[int, int]:
    return schedule.num_ranks, schedule.num_microbatches


def _from_first_rank(number: int) -> int:
    """``number`` of rank 0, on every rank of the job."""
    device = "cpu" if dist.get_backend() == "gloo" else "cuda"
    box = torch.tensor([number], device=device)
    dist.broadcast(box, src=0)
    return int(box.item())

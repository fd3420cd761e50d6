"""``zb-auto`` in training: measure under a handcrafted schedule, plan in another process, switch between iterations.

Rank 0 starts the planner, a process at the lowest priority (``planner``), so that no rank waits for it. While it runs,
rank 0 broadcasts in every iteration whether it has finished, so that all ranks switch in the same iteration; they
receive the schedule from rank 0. The order of passes does not change the results, so the loss curve is unaffected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron.zero_bubble.adapter.measured import Replanner, size_of
from megatron.zero_bubble.adapter.planner import Planner
from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.formats.costs import costs_to_json
from megatron.zero_bubble.ir import WHOLE, Schedule, Slices
from megatron.zero_bubble.ir.vocabulary import Algorithm
from megatron.zero_bubble.job.post_validation import planned_gain
from megatron.zero_bubble.measure.gather import median_costs
from megatron.zero_bubble.measure.memory import MemoryMeter
from megatron.zero_bubble.planning.source import ScheduleSource
from megatron.zero_bubble.planning.worker import Request
from megatron.zero_bubble.runtime.observer import IterationStart
from megatron.zero_bubble.search.placements import PlacementName


@dataclass(frozen=True)
class AutoOptions:
    """Options of ``zb-auto``.

    Attributes:
        memory_limit: activation-memory limit as in ``zero-bubble plan --memory-limit``; ``1p`` is the peak of 1F1B.
        placement: stage placement; it does not change during the run.
        num_chunks: stages per rank, if the placement has a choice and they are given.
        post_validation: whether optimizer steps are validated in the next iteration, so that the plan minimizes the
            span instead of the makespan.
        slices: the cuts of sequences; they do not change during the run.
        vocabulary: the algorithm of vocabulary parallelism, if any; it does not change during the run.
        warm_up: iterations before the first measurement.
        measured: iterations per measurement.
        check_every: iterations between measurements that check the pass times for drift.
        drift: relative change of the predicted iteration time above which a new plan is made.
    """

    memory_limit: str = "1p"
    placement: PlacementName = "linear"
    post_validation: bool = False
    slices: Slices = WHOLE
    vocabulary: Algorithm | None = None
    num_chunks: int | None = None
    warm_up: int = 2
    measured: int = 4
    check_every: int = 100
    drift: float = 0.1


class AutoSchedule(Replanner):
    """The schedule of ``zb-auto``, which measures training iterations and switches schedules between iterations.

    Args:
        memory: measures the memory of microbatches; must be an observer of the same pipeline.
        say: prints a log line; called on rank 0 only.
    """

    def __init__(self, options: AutoOptions, memory: MemoryMeter, say: Callable[[str], None]) -> None:
        super().__init__(options.measured)
        self._options = options
        self._memory = memory
        self._say = say
        self._planned: dict[tuple[int, int], Schedule] = {}  # by ranks and microbatches
        self._first: dict[tuple[int, int, bool], Schedule] = {}
        self._recomputes = False
        self._costs: PassCosts | None = None
        self._hopeless: set[tuple[int, int]] = set()
        self._next_measurement = options.warm_up
        self._planner: Planner | None = None
        self._planning_for = (0, 0)
        self._waiting = False

    def make(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """The schedule of the next iteration: the planned one if it is ready, else the first one."""
        size = num_ranks, num_microbatches
        if size in self._planned:
            return self._planned[size]
        if (first := (*size, self._recomputes)) not in self._first:
            options = self._options
            of_job = options.placement, num_ranks, options.slices, options.vocabulary
            source = ScheduleSource.automatic(*of_job, self._recomputes, options.num_chunks)
            self._first[first] = source.make(num_microbatches)
        return self._first[first]

    def begin(self, start: IterationStart) -> bool:
        """Switch to a finished plan; returns whether to measure the passes of this iteration."""
        size = start.group.size(), start.num_microbatches
        if start.chunks:
            self._recomputes = get_model_config(start.chunks[0]).recompute_granularity == "full"
        if self._waiting:
            self._switch_if_planned()
        self._plan_for(size)
        return not self._waiting and self.iteration >= self._next_measurement

    def close(self) -> None:
        """Kill the planner if it is running; called at the end of training."""
        if self._planner is not None:
            self._planner.kill()
            self._planner = None

    def _plan_for(self, size: tuple[int, int]) -> None:
        """Schedule a measurement for a size without a plan, as soon as the warm-up is over."""
        if size not in self._planned and size not in self._hopeless:
            self._next_measurement = min(self._next_measurement, max(self.iteration, self._options.warm_up))

    def evaluate(self, timelines: list[Timeline], start: IterationStart) -> None:
        """After a measurement, log predicted and measured times; rank 0 decides whether to start the planner."""
        group, num_microbatches = start.group, start.num_microbatches
        size = group.size(), num_microbatches
        costs = median_costs(timelines, self._costs)
        memory = self._memory.gather(group)
        replan = False
        if dist.get_rank() == 0:
            schedule = self.make(group.size(), num_microbatches)
            predicted = simulate(schedule, costs).makespan_ms
            measured = median(timeline.makespan_ms for timeline in timelines)
            self._say(
                f"zb-auto: iteration {self.iteration + 1}, {schedule.name}: predicted {predicted:.1f} ms from the "
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
                        options.slices,
                        options.vocabulary,
                        options.num_chunks,
                    )
                )
        self._waiting = bool(_from_first_rank(int(replan)))
        self._planning_for = size
        self._next_measurement = self.iteration + self._options.check_every

    def _drifted(self, schedule: Schedule, costs: PassCosts) -> bool:
        assert self._costs is not None, "costs are set when the first plan is requested"
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
            self._say(f"zb-auto: iteration {self.iteration + 1}: {said}")
            if box[0] is not None and self._options.post_validation and self._costs is not None:
                self._say(f"zb-auto: {planned_gain(simulate(box[0], self._costs))}")
        dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            self._hopeless.add(self._planning_for)
        else:
            self._planned[size_of(box[0])] = box[0]
            self._next_measurement = self.iteration + 1


def _from_first_rank(number: int) -> int:
    """Broadcast ``number`` from rank 0 to all ranks of the job."""
    device = "cpu" if dist.get_backend() == "gloo" else "cuda"
    box = torch.tensor([number], device=device)
    dist.broadcast(box, src=0)
    return int(box.item())

"""``zb-auto`` in training: measure under a handcrafted schedule, plan in another process, switch between iterations.

Rank 0 starts the planner, a process at the lowest priority (``planner``), so that no rank waits for it. While it runs,
rank 0 broadcasts in every iteration whether it has finished, so that all ranks switch in the same iteration; they
receive the schedule from rank 0. The order of passes does not change the results, with two exceptions where it depends
on measured times (``docs/exactness.md``): dropout with several stages per rank, and the rounding of fused backwards.

If the lengths of microbatches vary, so may the number of them, from call to call and from replica to replica. Then each
replica plans for itself, by its own first rank; those that share experts plan together. What is measured is the mean
microbatch, for which every number of microbatches is planned when it first occurs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron.zero_bubble.core.analysis.memory import peaks_in_order
from megatron.zero_bubble.core.analysis.score import within
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.units import format_bytes, parse_memory_limit
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile, costs_to_json
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.plan import PostReceives
from megatron.zero_bubble.core.schedules import SCHEDULES
from megatron.zero_bubble.engine.measure.gather import median_costs
from megatron.zero_bubble.engine.measure.memory import MemoryMeter
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.runtime.observer import IterationStart
from megatron.zero_bubble.integration.adapter.deciders import Deciders
from megatron.zero_bubble.integration.adapter.measured import Replanner, size_of
from megatron.zero_bubble.integration.adapter.planner import Planner
from megatron.zero_bubble.integration.adapter.prepared import queues_of
from megatron.zero_bubble.integration.adapter.recent import Recent
from megatron.zero_bubble.integration.adapter.room import measured_limit
from megatron.zero_bubble.planning import figures
from megatron.zero_bubble.planning.codecs import spell
from megatron.zero_bubble.planning.cuts import slices_of
from megatron.zero_bubble.planning.feasibility import ANY_RUN, Feasibility
from megatron.zero_bubble.planning.job.post_validation import planned_gain
from megatron.zero_bubble.planning.setup import AUTO_LIMIT, DEFAULT_LIMIT, Cuts, Named, Searched, Setup
from megatron.zero_bubble.planning.source import DEFAULT_CHUNKS, ScheduleSource
from megatron.zero_bubble.planning.worker import Request

_GO_ON, _REPLAN, _GO_BACK = 0, 1, 2
"""What rank 0 decides after a measurement."""
_TOLERANCE = 0.01
"""The share of its time by which a plan may be slower than the schedule before it, for the noise of measurements."""
_MOST_PLANS = 64
"""Plans kept, of different numbers of microbatches; as many as a pipeline keeps."""


@dataclass(frozen=True)
class AutoOptions:
    """Options of ``zb-auto``.

    Attributes:
        setup: what the run does; only the order of passes changes during the run.
        runs: what the run adds to its plans; that of its GPUs is known when an iteration begins.
        warm_up: iterations before the first measurement.
        measured: iterations per measurement.
        check_every: iterations between measurements that check the pass times for drift.
        drift: relative change of the predicted iteration time above which a new plan is made.
    """

    setup: Setup
    runs: Feasibility = ANY_RUN
    warm_up: int = 2
    measured: int = 4
    check_every: int = 100
    drift: float = 0.1

    @property
    def order(self) -> Searched:
        assert isinstance(self.setup.order, Searched), "zb-auto searches"
        return self.setup.order


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
        self._planned: Recent[tuple[int, int], Schedule] = Recent(_MOST_PLANS)  # by ranks and microbatches
        self._first: Recent[tuple[int, int, bool], Schedule] = Recent(_MOST_PLANS)
        self._recomputes = False
        self._costs: PassCosts | None = None
        self._without_plan: set[tuple[int, int]] = set()
        self._before: dict[tuple[int, int], float] = {}  # measured ms of the schedule before the plan
        self._next_measurement = options.warm_up
        self._planner: Planner | None = None
        self._planning_for = (0, 0)
        self._waiting = False
        self._compares = False  # whether the next measurement is the first of a plan
        self._memory_of: PassMemory | None = None
        self._limit = options.order.limit or DEFAULT_LIMIT
        self._runs = options.runs
        self._used: float | None = None  # the limit in bytes that the last plan was searched with

    def make(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """The schedule of the next iteration: the planned one if it is ready, else the first one."""
        size = num_ranks, num_microbatches
        if (planned := self._planned.get(size)) is not None:
            return planned
        key = *size, self._recomputes
        if (first := self._first.get(key)) is None:
            source = ScheduleSource.of(self._setup, num_ranks, fused=self._recomputes)
            first = self._first[key] = source.make(num_microbatches)
        return first

    def is_settled(self) -> bool:
        """Whether a plan was searched for and, if it runs, compared with the schedule before it; on all ranks alike."""
        return self._costs is not None and not self._waiting and not self._compares

    def begin(self, start: IterationStart) -> bool:
        """Switch to a finished plan; returns whether to measure the passes of this iteration."""
        size = start.group.size(), start.num_microbatches
        if start.varies:
            self._check_limit()
        self._runs = self._found(start)
        if start.chunks:
            self._recomputes = get_model_config(start.chunks[0]).recompute_granularity == "full"
        if self._waiting:
            self._switch_if_planned(Deciders.of(start))
        if start.varies and self._costs is not None:
            self._plan_from_known(size, Deciders.of(start))
        else:
            self._plan_for(size)
        return not self._waiting and self.iteration >= self._next_measurement

    def _found(self, start: IterationStart) -> Feasibility:
        """What the run has for its plans on these GPUs."""
        own = self._options.runs
        post_receives: PostReceives = "late" if start.has_headers else own.post_receives
        has = select("auto").num_multiprocessors()
        return replace(own, queues=queues_of(start.group), post_receives=post_receives, num_multiprocessors=has)

    def close(self) -> None:
        """Kill the planner if it is running; called at the end of training."""
        if self._planner is not None:
            self._planner.kill()
            self._planner = None

    def _plan_for(self, size: tuple[int, int]) -> None:
        """Schedule a measurement for a size without a plan, as soon as the warm-up is over."""
        if size not in self._planned and size not in self._without_plan:
            self._next_measurement = min(self._next_measurement, max(self.iteration, self._options.warm_up))

    def _plan_from_known(self, size: tuple[int, int], deciders: Deciders) -> None:
        """Plan for a new number of microbatches; the costs of the mean microbatch do not depend on it."""
        if self._waiting or size in self._planned or size in self._without_plan:
            return
        if deciders.is_first:
            self._planner = Planner(self._request(size))
        self._waiting, self._planning_for = True, size

    def _check_limit(self) -> None:
        """Refuse a limit that lengths do not fit into.

        Raises:
            UserError: a memory limit in bytes.
        """
        if self._limit == AUTO_LIMIT:
            self._limit = DEFAULT_LIMIT
        if parse_memory_limit(self._limit)[1] != "p":
            raise UserError(
                "a memory limit in bytes needs microbatches of equal length, because a plan counts microbatches, and "
                f"longer ones need more; got {self._limit}; give the limit in units of the memory of "
                "1F1B, such as 1p, which holds for microbatches as long as the longest"
            )

    def _request(self, size: tuple[int, int]) -> Request:
        assert self._costs is not None and self._memory_of is not None, "both are measured before the first plan"
        return Request(costs_to_json(self._costs, self._memory_of), *size, self._setup, self._runs)

    @property
    def _setup(self) -> Setup:
        """With the limit as it is known now, and what the GPUs need."""
        setup, order = self._options.setup, replace(self._options.order, limit=self._limit)
        return replace(setup, order=order, messages=replace(setup.messages, receives=self._runs.post_receives))

    def evaluate(self, timelines: list[Timeline], start: IterationStart) -> None:
        """After a measurement, log predicted and measured times; rank 0 decides whether to start the planner."""
        group, num_microbatches = start.group, start.num_microbatches
        size = group.size(), num_microbatches
        deciders = Deciders.of(start)
        costs = median_costs(timelines, self._costs, varies=start.varies)
        self._memory_of = self._memory.gather(group)
        if self._limit == AUTO_LIMIT:
            self._limit = measured_limit(self._memory)
        decision = _GO_ON
        if deciders.is_first:
            schedule = self.make(group.size(), num_microbatches)
            predicted = simulate(schedule, costs).makespan_ms
            measured = median(timeline.makespan_ms for timeline in timelines)
            of = "the mean microbatch" if start.varies else "the measured passes"
            self._log(
                f"iteration {self.iteration + 1}, {schedule.name}: predicted {predicted:.1f} ms from {of}, measured "
                f"{measured:.1f} ms"
            )
            known = size in self._planned or size in self._without_plan
            if self._costs is None or not known:
                decision = _REPLAN
                self._before[size] = measured
            elif self._is_slower(size, measured):
                decision = _GO_BACK
            elif self._drifted(schedule, costs, start.varies):
                decision = _REPLAN
        decision = deciders.number(decision)
        if decision == _GO_BACK:
            self._planned[size] = self._first[(*size, self._recomputes)]
        self._waiting, self._compares = decision == _REPLAN, False
        if self._waiting:
            self._costs = costs
            if deciders.is_first:
                self._planner = Planner(self._request(size))
            if start.varies:  # plans for other numbers of microbatches are out of date too
                self._planned.clear()
                self._without_plan.clear()
        self._planning_for = size
        self._next_measurement = self.iteration + self._options.check_every

    def _is_slower(self, size: tuple[int, int], measured: float) -> bool:
        """Whether to give up the plan, because it takes longer than the schedule before it; asked and logged once per
        plan.
        """
        before = self._before.pop(size, None)
        first, plan = self._first.get((*size, self._recomputes)), self._planned.get(size)
        if before is None or first is None or plan is None or self._memory_of is None:
            return False
        gain = measured / before - 1
        times = f"{measured:.1f} ms, and {first.name} {before:.1f} ms ({gain:+.1%})"
        is_slower = self._options.order.keep_faster and gain > _TOLERANCE
        if is_slower and not self._fits(first, size):
            times += f", which is above the limit of {self._limit}"
        elif is_slower:
            self._log(
                f"iteration {self.iteration + 1}: back to {first.name}, because the planned schedule takes {times}"
            )
            return True
        peak, limit = max(peaks_in_order(plan, self._memory_of)), self._used_limit(size)
        self._log(
            f"iteration {self.iteration + 1}: the planned schedule takes {times}; its activations take "
            f"{format_bytes(peak)} on the fullest rank, within the limit of {limit}"
        )
        self._log(f"to keep this plan: {self._how_to_keep(size, limit, first if plan == first else None)}")
        return False

    def _fits(self, schedule: Schedule, size: tuple[int, int]) -> bool:
        """Whether the activations of a schedule are within the memory limit, which the first schedule may not be."""
        if self._limit == DEFAULT_LIMIT:
            return True  # it is at least the peak of the first schedule
        assert self._memory_of is not None, "it is measured before the first plan"
        return within(max(peaks_in_order(schedule, self._memory_of)), self._figures(size).limit(self._limit))

    def _used_limit(self, size: tuple[int, int]) -> str:
        """The memory limit that the last plan was searched with: at least the peak of the first schedule by default,
        and less where only orders within less could run.
        """
        own = self._figures(size)
        if self._used is None or self._used == own.limit(self._limit):
            return self._limit
        return f"{self._used / own.peak_of_1f1b:.10g}p"

    def _figures(self, size: tuple[int, int]) -> figures.Figures:
        assert self._costs is not None and self._memory_of is not None, "both are measured before the first plan"
        return figures.measured(CostsFile.parse(costs_to_json(self._costs, self._memory_of)), *size)

    def _how_to_keep(self, size: tuple[int, int], limit: str | None = None, first: Schedule | None = None) -> str:
        """A command that gives the plan.

        Args:
            limit: the memory limit that it was searched with.
            first: the schedule that the run began with, if it is the plan.
        """
        order, setup = self._options.order, self._options.setup
        if first is not None and first.name not in SCHEDULES:
            return "nothing is needed, because it is the schedule that every such run begins with"
        if first is not None:
            run = spell(Setup(Named(first.name, order.stages), early_recompute=setup.early_recompute))
            return f"run {' '.join(run)}, with which the run began"
        stages = order.stages or DEFAULT_CHUNKS.get(order.of_run)
        searched = Searched(order.of_run, stages, limit or self._limit)
        slices = slices_of(setup.cuts)
        cuts = None if slices is None or len(slices) == 1 else Cuts(None, slices.ends)
        own = Setup(searched, cuts=cuts, vocabulary=setup.vocabulary, early_recompute=setup.early_recompute)
        asked = spell(own, "plan")
        command = (
            f"zero-bubble plan --costs FILE --num-ranks {size[0]} --num-microbatches {size[1]} {' '.join(asked)} "
            f"--objective {setup.objective}"
        )
        return (
            f"record costs with --zero-bubble-record-costs FILE, plan with `{command} --format json > plan.json`, and "
            "run the plan with --zero-bubble-schedule plan.json"
        )

    def _drifted(self, schedule: Schedule, costs: PassCosts, varies: bool) -> bool:
        """Whether an iteration takes another time than with the costs of the last plan; if lengths vary, in proportion
        to its F, because a mean microbatch may be longer than another.
        """
        assert self._costs is not None, "costs are set when the first plan is requested"
        before, now = (
            simulate(schedule, figures).makespan_ms / (sum(figures.forward_ms) if varies else 1.0)
            for figures in (self._costs, costs)
        )
        return abs(now - before) > self._options.drift * before

    def _switch_if_planned(self, deciders: Deciders) -> None:
        if not deciders.number(int(self._planner is not None and self._planner.finished())):
            return
        self._waiting = False
        box: list[Any] = [None, ""]
        if self._planner is not None:
            box = list(self._planner.result())
            self._used = self._planner.limit
            self._planner = None
        deciders.broadcast(box)
        schedule, said = box
        # Environments may differ between nodes, so every rank asks for itself.
        refused = None if schedule is None else self._runs.refusal(schedule, memory=self._memory_of)
        if deciders.any(refused is not None):
            why = refused or "other ranks have another environment"
            schedule, said = None, f"no plan, the schedule stays as it is: {why}"
        self._log(f"iteration {self.iteration + 1}: {said}")
        if schedule is None:
            self._without_plan.add(self._planning_for)
            return
        if self._options.setup.objective == "span" and self._costs is not None:
            self._log(planned_gain(simulate(schedule, self._costs)))
        self._planned[size_of(schedule)] = schedule
        self._compares = True
        if not deciders.of_replica:
            self._next_measurement = self.iteration + 1

    def _log(self, text: str) -> None:
        """Log on rank 0; other replicas may plan too."""
        if dist.get_rank() == 0:
            self._say(f"zb-auto: {text}")

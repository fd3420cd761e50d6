"""Stages that compute nothing, so that the real executor and the real transport can be watched at any size.

``VirtualStage`` never sleeps: each rank keeps a logical clock, a pass advances it by its planned duration, and the
first element of every tensor carries the sender's clock through the real transport. A receiver takes the later of the
two, plus the link's latency. The clocks then tell what the runtime executed, exactly, on a machine under any load;
they are blind to overhead. ``SleepingStage`` spends the time for real, and shows the overhead. Optimizer steps between
iterations, synchronous or taken ahead, are emulated the same way, over the channels of the real ones.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.analysis.timeline import Span
from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.ir import Kind, Pass, Schedule
from megatron.zero_bubble.plan import Plan, lower, with_validation
from megatron.zero_bubble.runtime.executor import Channels, Executor, Stage
from megatron.zero_bubble.runtime.global_state import Chain, Reduction
from megatron.zero_bubble.runtime.recorder import Recorder
from megatron.zero_bubble.runtime.transport import Transport
from megatron.zero_bubble.schedules import SCHEDULES, build

# Forward, backward, weight gradient and transfer in ms: equal passes, a GPT of the Zero Bubble paper, a slow link.
_COST_RATIOS = ((10.0, 10.0, 10.0, 0.0), (18.522, 18.086, 9.337, 0.601), (5.0, 9.0, 3.0, 4.0))

# time.sleep oversleeps by 0.05 to 0.3 ms, so the rest of a pass is spun. Ranks share cores and often wake together: who
# spins for longer takes the core from who has a tensor to pass on, and so does who spins without yielding. Beyond the
# ideal, a 50 ms pass of 8 ranks on 2 cores took 0.6 ms at 2 ms of plain spinning, 0.18 ms at none, 0.05 ms at this.
_SPIN_S = 0.0005


class VirtualClock:
    """The logical time of one rank, and the passes it saw."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.spans: list[Span] = []

    def advance(self, work: Pass, ready_ms: float, duration_ms: float) -> None:
        """Run ``work`` as soon as the rank is free and its input is there."""
        start = max(self.now_ms, ready_ms)
        self.now_ms = start + duration_ms
        self.spans.append(Span(work, start, self.now_ms))


class VirtualStage:
    """Every stage of one rank, on its clock; the tensors are float64 of ``num_elements``."""

    def __init__(self, schedule: Schedule, costs: PassCosts, clock: VirtualClock, num_elements: int = 1) -> None:
        self._schedule = schedule
        self._costs = costs
        self._clock = clock
        self._num_elements = num_elements

    def forward(self, work: Pass, x: torch.Tensor | None, split: bool) -> torch.Tensor | None:
        return self._run(work, x, work.stage - 1, work.stage + 1)

    def backward(self, work: Pass, grad: torch.Tensor | None) -> torch.Tensor | None:
        return self._run(work, grad, work.stage + 1, work.stage - 1)

    def backward_weight(self, work: Pass) -> None:
        self._run(work, None, work.stage, work.stage)

    def _run(self, work: Pass, received: torch.Tensor | None, source: int, target: int) -> torch.Tensor | None:
        stage_to_rank = self._schedule.placement.stage_to_rank
        ready_ms = 0.0
        if received is not None:
            ready_ms = float(received[0]) + self._costs.comm(stage_to_rank[source], stage_to_rank[work.stage])
        self._clock.advance(work, ready_ms, self._costs.duration(work, self._schedule.num_slices))
        if work.kind is Kind.W or not 0 <= target < len(stage_to_rank):
            return None
        return torch.full((self._num_elements,), self._clock.now_ms, dtype=torch.float64)


class SleepingStage:
    """Stages whose passes take their planned time on the wall clock; the tensors are float32 of ``shape``."""

    def __init__(self, schedule: Schedule, costs: PassCosts, shape: tuple[int, ...]) -> None:
        self._schedule = schedule
        self._costs = costs
        self._output = torch.zeros(shape)

    def forward(self, work: Pass, x: torch.Tensor | None, split: bool) -> torch.Tensor | None:
        self._sleep(work)
        return self._output if work.stage < self._schedule.num_stages - 1 else None

    def backward(self, work: Pass, grad: torch.Tensor | None) -> torch.Tensor | None:
        self._sleep(work)
        return self._output if work.stage > 0 else None

    def backward_weight(self, work: Pass) -> None:
        self._sleep(work)

    def _sleep(self, work: Pass) -> None:
        sleep_until(time.perf_counter() + self._costs.duration(work, self._schedule.num_slices) / 1e3)


class VirtualOptimizer:
    """An optimizer whose step takes ``step_ms`` on a rank's clock, and knows the time when it knows the gradients.

    Args:
        ahead: whether it steps before all ranks have ended their passes.
    """

    def __init__(self, clock: VirtualClock, step_ms: float, ahead: bool, group: dist.ProcessGroup) -> None:
        self._clock, self._step_ms, self._ahead, self._group = clock, step_ms, ahead, group
        self._chain = Chain(group)
        self._all: Reduction | None = None

    def step(self) -> None:
        """After the passes of an iteration."""
        now = torch.tensor([self._clock.now_ms], dtype=torch.float64)
        self._all = Reduction(now.clone(), dist.ReduceOp.MAX, self._group)
        if self._ahead:
            before = self._chain.receive(1)
            now = now if before is None else torch.maximum(now, before)
            self._chain.send(now)
            self._clock.now_ms = now.item()
        else:
            self.validate()
        self._clock.now_ms += self._step_ms

    def validate(self) -> bool:
        """Wait for the figures of all ranks; they are always right here."""
        if self._all is not None:
            self._clock.now_ms = max(self._clock.now_ms, self._all.wait())
            self._all = None
        return True

    def settle(self) -> None:
        """After the last iteration."""
        self.validate()
        self._chain.settle()


class SleepingOptimizer:
    """The same on the wall clock."""

    def __init__(self, step_ms: float, ahead: bool, group: dist.ProcessGroup) -> None:
        self._clock = VirtualClock()
        self._step_ms = step_ms
        self._figures = VirtualOptimizer(self._clock, 0.0, ahead, group)
        self.validate, self.settle = self._figures.validate, self._figures.settle

    def step(self) -> None:
        """After the passes of an iteration."""
        self._figures.step()
        sleep_until(time.perf_counter() + self._step_ms / 1e3)


def execute(
    plan: Plan,
    stage: Stage,
    transport: Transport,
    like: torch.Tensor,
    validate: Callable[[], bool] = lambda: True,
    recorder: Recorder | None = None,
) -> None:
    """Run this rank's part of ``plan`` with ``stage`` for all its stages; every message has the form of ``like``."""
    rank = transport.rank
    stages = dict.fromkeys(plan.schedule.placement.stages_of(rank), stage)
    channels: Channels = transport
    if recorder is not None:
        channels, validate = recorder.watch(channels, validate)
    Executor(plan, rank, stages, channels, lambda _message: torch.empty_like(like), recorder, validate).run()


def virtual_iterations(
    schedule: Schedule, costs: PassCosts, step_ms: float, ahead: bool, count: int, transport: Transport
) -> list[float]:
    """When this rank ends the optimizer step of each of ``count`` iterations in a row, in ms of its virtual clock."""
    plan = with_validation(lower(schedule))
    transport.open(plan.channels)
    clock = VirtualClock()
    assert dist.group.WORLD is not None
    optimizer = VirtualOptimizer(clock, step_ms, ahead, dist.group.WORLD)
    stage, like = VirtualStage(schedule, costs, clock), torch.empty(1, dtype=torch.float64)
    ends = []
    for _ in range(count):
        execute(plan, stage, transport, like, optimizer.validate)
        optimizer.step()
        ends.append(clock.now_ms)
    optimizer.settle()
    return ends


def virtual_cases(num_ranks: int) -> Iterator[tuple[Schedule, PassCosts]]:
    """Every registered schedule with 1, P and 3P microbatches, each under three ratios of costs."""
    for name in SCHEDULES:
        for num_microbatches in (1, num_ranks, 3 * num_ranks):
            schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
            for ratio in _COST_RATIOS:
                yield schedule, PassCosts.uniform(schedule.placement, *ratio)


def virtual_deviation_ms(
    schedule: Schedule, costs: PassCosts, transport: Transport, num_elements: int = 1024
) -> tuple[float, str]:
    """Execute ``schedule`` on virtual clocks and compare each pass of this rank with the simulation.

    Args:
        num_elements: of every message, each a float64.

    Returns:
        The largest difference of a start or an end, and the pass it is of; infinite where the order differs.
    """
    plan = lower(schedule)
    transport.open(plan.channels)
    clock = VirtualClock()
    like = torch.empty(num_elements, dtype=torch.float64)
    execute(plan, VirtualStage(schedule, costs, clock, num_elements), transport, like)
    planned = simulate(schedule, costs).spans[transport.rank]
    if [span.pass_ for span in clock.spans] != [span.pass_ for span in planned]:
        return math.inf, "order"
    return max(
        (max(abs(ran.start_ms - due.start_ms), abs(ran.end_ms - due.end_ms)), str(due.pass_))
        for ran, due in zip(clock.spans, planned, strict=True)
    )


def sleep_until(deadline: float) -> None:
    """Sleep until shortly before ``deadline`` (``time.perf_counter``), then spin, yielding the core."""
    remaining = deadline - time.perf_counter()
    if remaining > _SPIN_S:
        time.sleep(remaining - _SPIN_S)
    while time.perf_counter() < deadline:
        os.sched_yield()

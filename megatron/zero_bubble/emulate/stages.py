"""Stages that only take time, on a logical clock or on the wall clock."""

from __future__ import annotations

import time

import torch

from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.emulate.clock import VirtualClock, sleep_until
from megatron.zero_bubble.ir import Kind, Pass, Schedule


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

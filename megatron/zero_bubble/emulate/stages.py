"""Emulated stages, which take time on a logical clock or on the wall clock but compute nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.emulate.clock import VirtualClock, sleep_until
from megatron.zero_bubble.ir import Pass, Schedule


class VirtualStage:
    """All stages of one rank, on its logical clock; tensors have ``num_elements`` float64 elements."""

    def __init__(self, schedule: Schedule, costs: PassCosts, clock: VirtualClock, num_elements: int = 1) -> None:
        self._schedule = schedule
        self._costs = costs
        self._clock = clock
        self._num_elements = num_elements

    def run(self, work: Pass, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        ready_ms = max((float(tensor[0]) for tensor in inputs), default=0.0)
        self._clock.advance(work, ready_ms, self._costs.duration(work, self._schedule.slices))
        made = torch.full((self._num_elements,), self._clock.now_ms, dtype=torch.float64)
        return [made] * len(self._schedule.flow.outputs(work))


class SleepingStage:
    """Stages whose passes take their planned time on the wall clock; tensors are float32 with ``shape``."""

    def __init__(self, schedule: Schedule, costs: PassCosts, shape: tuple[int, ...]) -> None:
        self._schedule = schedule
        self._costs = costs
        self._output = torch.zeros(shape)

    def run(self, work: Pass, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sleep_until(time.perf_counter() + self._costs.duration(work, self._schedule.slices) / 1e3)
        return [self._output] * len(self._schedule.flow.outputs(work))

"""Emulated stages, which take time on a logical clock or on the wall clock but compute nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch

from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.costs.messages import occupied
from megatron.zero_bubble.core.ir import Message, Pair, Pass, Schedule
from megatron.zero_bubble.engine.runtime.handlers import Stage
from tests.helpers.emulate.clock import VirtualClock, sleep_until


class EmulatedStage(Stage, Protocol):
    """A stage that also knows the shapes of messages."""

    def new_buffer(self, message: Message) -> torch.Tensor:
        """An uninitialized tensor with the shape of ``message``."""
        ...


class VirtualStage:
    """All stages of one rank, on its logical clock; tensors have ``num_elements`` float64 elements."""

    def __init__(self, schedule: Schedule, costs: PassCosts, clock: VirtualClock, num_elements: int = 1) -> None:
        self._schedule = schedule
        self._costs = occupied(costs.recomputing(schedule.recomputed), schedule.placement)
        self._clock = clock
        self._num_elements = num_elements

    def run(self, work: Pass, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        ready_ms = max((float(tensor[0]) for tensor in inputs), default=0.0)
        self._clock.advance(work, ready_ms, self._costs.duration(work, self._schedule.slices))
        made = torch.full((self._num_elements,), self._clock.now_ms, dtype=torch.float64)
        return [made] * len(self._schedule.flow.outputs(work))

    def pair(self, op: Pair, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the two passes of a pair at the same time; each is recorded with half of it."""
        ready_ms = max((float(tensor[0]) for tensor in inputs), default=0.0)
        half_ms = self._costs.pair(op.forward, op.backward, self._schedule.slices) / 2
        for work in op.works:
            self._clock.advance(work, ready_ms, half_ms)
        made = torch.full((self._num_elements,), self._clock.now_ms, dtype=torch.float64)
        return [made] * len(op.effects(self._schedule.flow).gives)

    def new_buffer(self, _message: Message) -> torch.Tensor:
        return torch.empty(self._num_elements, dtype=torch.float64)


class SleepingStage:
    """Stages whose passes take their planned time on the wall clock.

    Their tensors are float32 with ``shape``, whose first dimension is the sequence; those of a slice have its share.
    """

    def __init__(self, schedule: Schedule, costs: PassCosts, shape: tuple[int, ...]) -> None:
        ends, flow = schedule.slices.in_tokens(shape[0]), schedule.flow
        self._tensors = [torch.zeros(end - start, *shape[1:]) for start, end in pairwise((0, *ends))]
        took = occupied(costs.recomputing(schedule.recomputed), schedule.placement)
        # Computed in advance, so that a pass of any length adds as little as possible to its time.
        self._passes = {
            work: (took.duration(work, schedule.slices) / 1e3, [self._tensors[work.slice]] * len(flow.outputs(work)))
            for work in schedule.passes()
        }

    def run(self, work: Pass, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        begun = time.perf_counter()
        seconds, outputs = self._passes[work]
        sleep_until(begun + seconds)
        return outputs

    def new_buffer(self, message: Message) -> torch.Tensor:
        return torch.empty_like(self._tensors[message.producer.slice])

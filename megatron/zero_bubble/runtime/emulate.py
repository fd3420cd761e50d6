"""Stages that compute nothing, so that the real executor and the real transport can be watched at any size.

``VirtualStage`` never sleeps: each rank keeps a logical clock, a pass advances it by its planned duration, and the
first element of every tensor carries the sender's clock through the real transport. A receiver takes the later of the
two, plus the link's latency. The clocks then tell what the runtime executed, exactly, on a machine under any load;
they are blind to overhead. ``SleepingStage`` spends the time for real, and shows the overhead.
"""

from __future__ import annotations

import time

import torch

from megatron.zero_bubble.analysis.timeline import Span
from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.ir import Kind, Pass, Schedule

# time.sleep oversleeps by a few hundred microseconds; the rest of a pass is spun.
_SPIN_S = 0.002


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
    """A stage on a virtual clock; its tensors are float64 of ``num_elements``.

    Args:
        clock: shared by the stages of a rank.
    """

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
    """A stage whose passes take their planned time on the wall clock; its tensors are float32 of ``num_elements``."""

    def __init__(self, schedule: Schedule, costs: PassCosts, num_elements: int) -> None:
        self._schedule = schedule
        self._costs = costs
        self._output = torch.zeros(num_elements)

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


def sleep_until(deadline: float) -> None:
    """Sleep until shortly before ``deadline`` (``time.perf_counter``), then spin."""
    remaining = deadline - time.perf_counter()
    if remaining > _SPIN_S:
        time.sleep(remaining - _SPIN_S)
    while time.perf_counter() < deadline:
        pass

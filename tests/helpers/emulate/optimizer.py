"""Emulated optimizers, which take time but compute nothing."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron.zero_bubble.engine.optimizer.global_state import RankChain, Reduction
from tests.helpers.emulate.clock import VirtualClock, sleep_until


class VirtualOptimizer:
    """An optimizer whose step takes ``step_ms`` on a rank's clock; it exchanges clock times instead of gradient norms.

    Args:
        ahead: whether it steps before all ranks have ended their passes, as with post-validation.
    """

    def __init__(self, clock: VirtualClock, step_ms: float, ahead: bool, group: dist.ProcessGroup) -> None:
        self._clock, self._step_ms, self._ahead, self._group = clock, step_ms, ahead, group
        self._chain = RankChain(group)
        self._all: Reduction | None = None

    def step(self) -> None:
        """Step, after the passes of an iteration."""
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
        """Wait for the figures of all ranks; the emulated step is always valid."""
        if self._all is not None:
            self._clock.now_ms = max(self._clock.now_ms, *self._all.wait())
            self._all = None
        return True

    def settle(self) -> None:
        """Wait for all messages, after the last iteration."""
        self.validate()
        self._chain.settle()


class SleepingOptimizer:
    """An optimizer whose step takes ``step_ms`` on the wall clock."""

    def __init__(self, step_ms: float, ahead: bool, group: dist.ProcessGroup) -> None:
        self._clock = VirtualClock()
        self._step_ms = step_ms
        self._figures = VirtualOptimizer(self._clock, 0.0, ahead, group)
        self.validate, self.settle = self._figures.validate, self._figures.settle

    def step(self) -> None:
        """Step, after the passes of an iteration."""
        self._figures.step()
        sleep_until(time.perf_counter() + self._step_ms / 1e3)

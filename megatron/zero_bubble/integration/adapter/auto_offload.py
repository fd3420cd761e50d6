"""``--zero-bubble-offload auto`` in training: measure passes and copies, then plan what moves.

The first iterations move as much as ``all`` does, so that they need the least memory, and so that copies are measured.
Then the first rank's figures are broadcast, and every rank plans the same moves from them. What moves does not change
the results, so the loss curve is unaffected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from statistics import median
from typing import Any

import torch.distributed as dist

from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.plan.offload import Move, select_longest
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.engine.measure.gather import median_costs
from megatron.zero_bubble.engine.measure.memory import MemoryMeter
from megatron.zero_bubble.engine.runtime.observer import IterationStart
from megatron.zero_bubble.integration.adapter.measured import Replanner
from megatron.zero_bubble.planning.offload import HostLimits, OffloadPlan, plan_offload

_WARM_UP, _MEASURED = 2, 3
"""Iterations before the measurement (cold caches, allocations), and iterations that are measured."""


class AutoMoves(Replanner):
    """Selects what moves: as much as possible at first, later what hides behind the measured passes.

    Args:
        memory: measures the memory of microbatches; must be an observer of the same pipeline.
        host_limit: bytes of host memory per rank; None for no limit.
        say: prints a log line; called on rank 0 only.
    """

    def __init__(self, memory: MemoryMeter, host_limit: int | None, say: Callable[[str], None]) -> None:
        super().__init__(_MEASURED)
        self._memory, self._say = memory, say
        self._host = HostLimits(per_rank=host_limit)
        self._figures: tuple[PassCosts, PassMemory] | None = None
        self._moves: dict[Schedule, tuple[Move, ...]] = {}

    def __call__(self, schedule: Schedule) -> Collection[Move]:
        """What moves in ``schedule`` in the next iteration; the same on all ranks."""
        if schedule not in self._moves:
            self._moves[schedule] = self._selected(schedule)
        return self._moves[schedule]

    def begin(self, start: IterationStart) -> bool:
        """See ``Replanner``: measure once, after the warm-up."""
        return self._figures is None and self.iteration >= _WARM_UP

    def evaluate(self, timelines: list[Timeline], start: IterationStart) -> None:
        """Derive the figures, and forget what was selected without them."""
        box: list[Any] = [(median_costs(timelines), self._memory.gather(start.group))]
        dist.broadcast_object_list(box, src=0)
        costs, memory = box[0]
        self._figures = costs_of_copies(costs, memory), memory
        self._moves.clear()

    def _selected(self, schedule: Schedule) -> tuple[Move, ...]:
        if self._figures is None:
            return select_longest(schedule, 1.0)
        costs, memory = self._figures
        if not any(costs.host_ms):
            if dist.get_rank() == 0:
                self._say("offload: nothing moves, because all backwards follow their forwards too closely")
            return ()
        plan = plan_offload(timeline_of(schedule, costs, memory), costs, memory, host=self._host)
        if dist.get_rank() == 0:
            self._say(f"offload: iteration {self.iteration + 1}: {_summary(plan, costs, memory)}")
        return plan.moves


def costs_of_copies(costs: PassCosts, memory: PassMemory) -> PassCosts:
    """Complete the times of copies: a stage of which nothing has moved has the bandwidth of the others.

    Args:
        costs: with times of copies for some stages, 0 for others.
        memory: in bytes.
    """
    both = list(zip(costs.host_ms, memory.activation, strict=True))
    per_byte = [ms / size for ms, size in both if ms]
    if not per_byte:
        return costs
    usual = median(per_byte)
    return replace(costs, host_ms=tuple(ms or usual * size for ms, size in both))


def _summary(plan: OffloadPlan, costs: PassCosts, memory: PassMemory) -> str:
    speed = sum(memory.activation) / sum(costs.host_ms) / 1e6
    device, host = (max(peaks) / 2**20 for peaks in (plan.device_peak, plan.host_peak))
    return (
        f"{plan.share:.0%} of the forwards move, planned from measured passes and copies at {speed:.3g} GB/s; "
        f"activations of at most {device:.4g} MiB on the device and {host:.4g} MiB on the host per rank"
    )

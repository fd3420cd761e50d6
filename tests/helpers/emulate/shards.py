"""The ops of sharded units on the virtual clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.ir import Op, Schedule
from megatron.zero_bubble.core.ir.shards import Close, Gather, Open, Reduce, ReleaseWeights, Wait
from megatron.zero_bubble.engine.runtime.handler import Handler
from tests.helpers.emulate.clock import VirtualClock


def virtual_shards(schedule: Schedule, costs: PassCosts, clock: VirtualClock) -> Mapping[type[Op], Handler]:
    """The handlers of one rank: weights and gradients are the time in ms at which their collective is complete."""

    def start(op: Gather | Reduce, _inputs: Sequence[float]) -> list[float]:
        return [clock.occupy(op, clock.now_ms, op.duration_ms(costs, schedule.slices))]

    def wait(op: Wait | Close, inputs: Sequence[float]) -> Sequence[float]:
        clock.wait(op, inputs[0])
        return inputs

    def free(_op: ReleaseWeights, _inputs: Sequence[float]) -> None:
        pass

    def allocate(_op: Open, _inputs: Sequence[float]) -> list[float]:
        return [clock.now_ms]

    return {Gather: start, Wait: wait, ReleaseWeights: free, Open: allocate, Reduce: start, Close: wait}

"""The ops of offloading on the virtual clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.ir import Op, Schedule
from megatron.zero_bubble.core.ir.offload import Discard, Evict, Fetch, Reclaim, ReleaseDevice
from megatron.zero_bubble.engine.runtime.handler import Handler
from tests.helpers.emulate.clock import VirtualClock


def virtual_offload(schedule: Schedule, costs: PassCosts, clock: VirtualClock) -> Mapping[type[Op], Handler]:
    """The handlers of one rank: the first element of a tensor is the time in ms at which it is there."""

    def copy(op: Evict | Fetch, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (held,) = inputs
        end_ms = clock.occupy(op, float(held[0]), op.duration_ms(costs, schedule.slices))
        return [torch.full_like(held, end_ms)]

    def wait(op: ReleaseDevice | Reclaim, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        clock.wait(op, float(inputs[0][0]))
        return inputs

    def discard(_op: Discard, _inputs: Sequence[torch.Tensor]) -> None:
        pass

    return {Evict: copy, ReleaseDevice: wait, Fetch: copy, Reclaim: wait, Discard: discard}

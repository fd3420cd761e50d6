"""The activation memory that a plan may take: what is free, as measured during the run."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.costs.units import BYTES
from megatron.zero_bubble.engine.measure.memory import MemoryMeter
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.runtime.groups import backend_of


def measured_limit(memory: MemoryMeter) -> str:
    """The activations that every rank has memory for, such as ``4.21GiB``. A collective call of all ranks.

    It is what activations took at their peak, and what is free beyond the peak of the process, on the rank where this
    is least.
    """
    room = memory.peak + select("auto").spare_memory_bytes()
    assert dist.group.WORLD is not None
    device = "cpu" if backend_of(dist.group.WORLD) == "gloo" else "cuda"
    least = torch.tensor([room], dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return f"{int(least.item()) / BYTES['GiB']:.3f}GiB"

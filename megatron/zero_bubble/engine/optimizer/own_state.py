"""The figures of one rank's gradients, from megatron-core's own functions, without the other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer


@contextlib.contextmanager
def reducing_over(group: dist.ProcessGroup, parts: Sequence[MegatronOptimizer]) -> Iterator[None]:
    """Context in which the reductions of the optimizers ``parts`` include only the ranks of ``group``."""
    missing = object()
    before = [part.__dict__.get("grad_stats_parallel_group", missing) for part in parts]
    for part in parts:
        part.grad_stats_parallel_group = group
    try:
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            if own is missing:
                del part.grad_stats_parallel_group
            else:
                part.grad_stats_parallel_group = own


def prepare(part: MegatronOptimizer) -> bool:
    """Run ``prepare_grads`` of one optimizer without changing its loss scale; True if a gradient is infinite."""
    scaler = getattr(part, "grad_scaler", None)
    before = scaler.state_dict() if scaler else None
    found_inf = part.prepare_grads()
    if scaler:
        scaler.load_state_dict(before)
    return found_inf

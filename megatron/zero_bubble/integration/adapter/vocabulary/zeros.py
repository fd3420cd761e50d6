"""The number of zeros in the gradients (``--log-num-zeros-in-grad``), without those of the padding of shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.engine.kernels.vocabulary import ShardRows
from megatron.zero_bubble.engine.runtime.backends import is_nccl
from megatron.zero_bubble.engine.runtime.groups import backend_of


def without_padding(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The replacement for ``count_zeros`` of megatron-core's optimizers."""

    @functools.wraps(original)
    def count_zeros(optimizer: Any) -> Any:
        zeros = original(optimizer)
        parts: Sequence[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
        if parts != [optimizer] and not optimizer.grads_states_parallel_group_is_shared():
            return zeros  # it is the sum of the counts of the parts
        group = optimizer.get_grad_stats_parallel_group()
        padding = sum(zeros_of_padding(weight, start, end) for part in parts for weight, start, end in _weights(part))
        total = torch.tensor([padding], device="cuda" if is_nccl(backend_of(group)) else "cpu")
        dist.all_reduce(total, group=group)
        return zeros - type(zeros)(total.item())

    return count_zeros


def zeros_of_padding(weight: Any, start: int, end: int) -> int:
    """The number of zeros in the gradient of those of the elements ``start`` to ``end`` that are padding."""
    rows: ShardRows | None = getattr(weight, "vocabulary_rows", None)
    gradient = getattr(weight, "main_grad", weight.grad)
    if rows is None or gradient is None:
        return 0
    padding = gradient.detach().reshape(-1)[max(start, rows.num_used * weight.shape[1]) : end]
    return padding.numel() - int(torch.count_nonzero(padding))


def _weights(part: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    """The weights of the model that an optimizer steps, and the first and last element that are its own."""
    if part.is_stub_optimizer:
        return
    if hasattr(part, "model_param_gbuf_map"):  # a distributed optimizer
        for weight in part.model_param_gbuf_map:
            within = part._get_model_param_range_map(weight)["param"]
            yield weight, within.start, within.end
        return
    halves = [*getattr(part, "float16_groups", ()), *getattr(part, "fp32_from_fp32_groups", ())]
    for weight in [weight for group in halves for weight in group] or part.get_parameters():
        yield weight, 0, weight.numel()

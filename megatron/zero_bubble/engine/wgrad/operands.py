"""Protects the operands of W, which wait between B and W, from what else writes to them.

The gradient that a linear gets in B may be shared: where a residual branch leaves, autograd hands one tensor to both
branches, and the other branch may write to it later in the same B (a fused norm that computes its gradient in place, a
collective that reduces in place). autograd computes W before that. Only a shared gradient can be written to, and nearly
none is: in a GPT, two of the four linears of a layer share theirs with a residual branch that only reads it. So the
first shared gradient of every weight is tried: W takes a copy, and when the B ends it turns out whether it was needed.
It then is in all later B of the weight, or in none. What does not follow this rule raises the version of the tensor,
and W refuses it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

Versions = tuple[int, ...]


def versions_of(tensors: Iterable[torch.Tensor]) -> Versions:
    """Changes whenever torch changes one of the tensors in place."""
    return tuple([tensor._version for tensor in tensors])  # faster than a generator


class _Trial(NamedTuple):
    weight: torch.nn.Parameter
    shared: torch.Tensor
    copy: torch.Tensor


class SharedGradients:
    """Copies the output gradients that the same backward writes to after it has given them to W.

    Attributes:
        tries: whether the first shared gradient of a weight is tried, which compares its values; if not, it is copied.
    """

    def __init__(self) -> None:
        self.tries = True
        self._is_written: dict[torch.nn.Parameter, bool] = {}
        self._trials: list[_Trial] = []

    def kept(self, weight: torch.nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        """The output gradient ``grad`` of a use of ``weight`` as W can keep it: without graph, and a copy if needed."""
        is_written = self._is_written.get(weight)
        if is_written is False or not is_shared(grad) or not grad.numel():
            return grad.detach()
        copy = grad.detach().clone()
        if is_written is None and self.tries:
            self._trials.append(_Trial(weight, grad.detach(), copy))
        return copy

    def settle(self) -> None:
        """The B has ended."""
        for weight, shared, copy in self._trials:
            if shared.untyped_storage().nbytes() == 0:
                continue  # freed
            if not _has_same_bits(shared, copy):
                self._is_written[weight] = True
            elif copy.any():  # zeros stay the same whatever scales them or adds them up
                self._is_written.setdefault(weight, False)
        self._trials.clear()

    def clear(self) -> None:
        """Forget the trials of a B that has failed."""
        self._trials.clear()


def is_shared(tensor: Any) -> bool:
    """Whether anything but the caller, who got the tensor from autograd, may refer to its memory.

    A torch without a count of the references to a tensor answers yes, which costs a trial.
    """
    if not hasattr(tensor, "_use_count") or tensor._use_count() > 1:
        return True
    # The storage counts its tensors, and the Python object that is made here.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2


def _has_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))  # the same NaN


def in_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def copied(operand: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """A copy of ``operand`` if it is in the memory of ``written``, else itself."""
    return operand.clone() if in_same_memory(operand, written) else operand


def reducing(
    original: Callable[..., torch.Tensor], before_writing: Callable[[torch.Tensor], None]
) -> Callable[..., torch.Tensor]:
    """The replacement for megatron-core's reduction over tensor-parallel ranks, which writes to its input.

    It reduces gradients in the backward of ``copy_to_tensor_model_parallel_region``. A collective does not raise the
    version of a tensor, so nothing would tell W. Others who have the gradient get it reduced, as without a schedule.

    Args:
        before_writing: copies what W needs.
    """

    @functools.wraps(original)
    def reduce(input_: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        if group is not None and group.size() > 1:
            before_writing(input_)
        return original(input_, group)

    return reduce

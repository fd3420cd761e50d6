"""Where weight gradients go, and when data parallelism may reduce them.

megatron-core's DistributedDataParallel accumulates a gradient into ``main_grad`` in a hook of autograd, and, with
``overlap_grad_reduce``, starts a bucket's reduction when each of its parameters was seen once in the last microbatch.
A deferred gradient calls that same hook, from its W: same arithmetic, same bookkeeping, only later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import layers

from megatron.zero_bubble.config import JobError


class GradAccumulator:
    """Adds deferred gradients to their parameters as the autograd hooks of the job would have."""

    def __init__(self) -> None:
        self._hooks: dict[torch.nn.Parameter, Callable[[], None] | None] = {}
        self._seen: set[int] = set()

    def watch(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Learn the hooks of the model chunks; cheap when they are known already.

        Raises:
            JobError: a wrapper with gradient hooks that only autograd can call.
        """
        for chunk in chunks:
            if id(chunk) in self._seen:
                continue
            self._seen.add(id(chunk))
            if isinstance(chunk, DistributedDataParallel):
                for parameter in chunk.param_to_bucket_group:
                    self._hooks[parameter] = chunk._make_backward_post_hook(parameter)
            elif hasattr(chunk, "no_sync"):
                raise JobError(
                    "a model chunk must be plain or wrapped in megatron-core's DistributedDataParallel, because "
                    f"deferred weight gradients must reach its hooks; got {type(chunk).__module__}."
                    f"{type(chunk).__name__}; turn it off (FSDP, torch DDP) or train without --zero-bubble-schedule"
                )

    def __call__(self, weight: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Accumulate ``grad`` (shape and dtype of ``weight``)."""
        hook = self._hooks.get(weight)
        if weight.grad is None:
            weight.grad = grad
        else:
            weight.grad += grad
        if hook is not None:
            hook()

    def fused(self, weight: Any, x: torch.Tensor, grad_output: torch.Tensor) -> None:
        """Accumulate ``grad_output^T x`` straight into ``main_grad`` with the kernel that the job's own
        ``gradient_accumulation_fusion`` uses; ``x`` is (tokens, in), ``grad_output`` (tokens, out).
        """
        kernels = layers.fused_weight_gradient_mlp_cuda
        fp32 = weight.main_grad.dtype is torch.float32
        accumulate = kernels.wgrad_gemm_accum_fp32 if fp32 else kernels.wgrad_gemm_accum_fp16
        accumulate(x, grad_output, weight.main_grad)
        weight.grad_added_to_main_grad = True
        # The hook wants some gradient of the weight's own dtype and, with the flag above, adds none, or for a shared
        # weight this one: a zero, expanded.
        weight.grad = weight.new_zeros(()).expand_as(weight)
        hook = self._hooks.get(weight)
        if hook is not None:
            hook()
        weight.grad = None


class GradSync:
    """Whether backwards of one chunk tell data parallelism that gradients are ready; off until ``enable``.

    Args:
        no_sync: the chunk's ``config.no_sync_func``, None for a model without data parallelism.
    """

    def __init__(self, no_sync: Callable[[], AbstractContextManager[Any]] | None) -> None:
        self._no_sync = no_sync or contextlib.nullcontext
        self._off: AbstractContextManager[Any] | None = None
        self.hold()

    @property
    def enabled(self) -> bool:
        return self._off is None

    def enable(self) -> None:
        """From here on the gradients of the last microbatch count as ready."""
        if self._off is not None:
            self._off.__exit__(None, None, None)
            self._off = None

    def hold(self) -> None:
        """Off again, as at the beginning: zeroing gradients has turned it on."""
        self.enable()
        self._off = self._no_sync()
        self._off.__enter__()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For a late W of an earlier microbatch: it accumulates, but makes nothing ready."""
        with contextlib.nullcontext() if self._off is not None else self._no_sync():
            yield

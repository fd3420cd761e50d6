"""Where weight gradients go, and when data parallelism may reduce them.

megatron-core's DistributedDataParallel accumulates a gradient into ``main_grad`` in a hook of autograd, and, with
``overlap_grad_reduce``, starts a bucket's reduction when each of its parameters was seen once in the last microbatch.
A deferred gradient calls that same hook, from its W: same arithmetic, same bookkeeping, only later.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import layers

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.wgrad.store import Product


class GradAccumulator:
    """Adds deferred gradients to their parameters as the autograd hooks of the job would have: the same bits."""

    with_bias = False

    def __init__(self) -> None:
        self._hooks: dict[torch.nn.Parameter, Callable[[], None] | None] = {}
        self._embeddings: set[torch.nn.Parameter] = set()
        self._seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def watch(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Learn the hooks and the embeddings of the model chunks; cheap when they are known already.

        Raises:
            UserError: a wrapper with gradient hooks that only autograd can call.
        """
        for chunk in chunks:
            if chunk in self._seen:
                continue
            self._seen.add(chunk)
            self._embeddings.update(m.weight for m in chunk.modules() if isinstance(m, layers.VocabParallelEmbedding))
            if isinstance(chunk, DistributedDataParallel):
                for parameter in chunk.param_to_bucket_group:
                    self._hooks[parameter] = chunk._make_backward_post_hook(parameter)
            elif hasattr(chunk, "no_sync"):
                raise UserError(
                    "a model chunk must be plain or wrapped in megatron-core's DistributedDataParallel, because "
                    f"deferred weight gradients must reach its hooks; got {type(chunk).__module__}."
                    f"{type(chunk).__name__}; turn it off (FSDP, torch DDP) or train without --zero-bubble-schedule"
                )

    def defers(self, weight: torch.nn.Parameter) -> bool:
        """Not where the weight is that of an embedding of the same chunk, too (multi-token prediction with a tied
        embedding): autograd then sums the gradients of all uses before one hook accumulates the sum.
        """
        return weight not in self._embeddings

    @torch.no_grad()
    def add(self, uses: Sequence[Sequence[Product]], ready: bool) -> None:
        """See ``store.Accumulator``. Several products of a weight in a microbatch (of the output layer under
        multi-token prediction) are summed in the weight's dtype first, as autograd does. Data parallelism knows by
        itself what is ready.
        """
        for use in uses:
            if use and use[0].by_kernel:
                self._by_the_jobs_kernel(use)
            elif use:
                grads = (product.grad_output.t().matmul(product.x) for product in use)
                self._add(use[0].weight, functools.reduce(torch.Tensor.add_, grads))

    def join(self) -> None:
        """Nothing is computed elsewhere."""

    def _add(self, weight: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Accumulate ``grad`` (shape and dtype of ``weight``)."""
        hook = self._hooks.get(weight)
        if weight.grad is None:
            weight.grad = grad
        else:
            weight.grad += grad
        if hook is not None:
            hook()

    def _by_the_jobs_kernel(self, use: Sequence[Product]) -> None:
        """Accumulate straight into ``main_grad`` with the kernel that the job's own ``gradient_accumulation_fusion``
        uses.
        """
        weight: Any = use[0].weight
        kernels = layers.fused_weight_gradient_mlp_cuda
        fp32 = weight.main_grad.dtype is torch.float32
        accumulate = kernels.wgrad_gemm_accum_fp32 if fp32 else kernels.wgrad_gemm_accum_fp16
        for product in use:
            accumulate(product.x, product.grad_output, weight.main_grad)
        weight.grad_added_to_main_grad = True
        self._tell(weight)

    def _tell(self, parameter: Any) -> None:
        """Tell data parallelism of a gradient that is in ``main_grad``."""
        hook = self._hooks.get(parameter)
        if hook is None:
            return
        # The hook wants some gradient of the parameter's own dtype and, with this flag, adds none, or for a shared
        # weight this one: a zero, expanded.
        before, parameter.grad_added_to_main_grad = parameter.grad_added_to_main_grad, True
        parameter.grad = parameter.new_zeros(()).expand_as(parameter)
        hook()
        parameter.grad, parameter.grad_added_to_main_grad = None, before

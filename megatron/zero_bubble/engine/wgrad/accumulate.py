"""Accumulates deferred weight gradients and reports them to data parallelism, through upstream's gradient hooks.

megatron-core's DistributedDataParallel accumulates a gradient into ``main_grad`` in an autograd hook. With
``overlap_grad_reduce`` it starts the reduction of a bucket once the hooks of all its parameters were called in the last
microbatch. A deferred gradient calls the same hook from its W pass: same arithmetic, same bookkeeping, only later.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import layers

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.wgrad.gradients import ComputedGradient, Product
from megatron.zero_bubble.engine.wgrad.hooks import ParameterHooks
from megatron.zero_bubble.engine.wgrad.stand_in import stand_in_grad


class GradAccumulator:
    """Accumulates deferred gradients with the job's own gradient hooks, bit for bit as an undeferred backward."""

    with_bias = False

    def __init__(self) -> None:
        self._hooks: dict[torch.Tensor, Callable[[], None] | None] = {}
        self._embeddings: set[torch.nn.Parameter] = set()
        self._seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._others = ParameterHooks()

    def connect(self, device: torch.device) -> None:
        """Called by all ranks of the job before a training iteration on ``device``."""

    def watch(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Collect the gradient hooks and embedding weights of the model chunks; cheap for chunks already seen.

        Raises:
            UserError: a chunk's wrapper has gradient hooks that only autograd can call.
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
                    "a model chunk must be unwrapped or wrapped in megatron-core's DistributedDataParallel, because "
                    f"deferred weight gradients need its hooks; got {type(chunk).__module__}."
                    f"{type(chunk).__name__}; turn it off (FSDP, torch DDP) or train without --zero-bubble-schedule"
                )
            self._others.watch(chunk.parameters())

    def defers(self, weight: torch.nn.Parameter) -> bool:
        """Whether the gradient of ``weight`` can be deferred.

        It cannot if the chunk also uses the weight as an embedding (multi-token prediction with a tied embedding),
        because autograd then sums the gradients of all uses before a single hook accumulates the sum.
        """
        return weight not in self._embeddings

    def is_hooked(self, *parameters: torch.Tensor | None) -> bool:
        """Whether one of the parameters has hooks that are not data parallelism's."""
        return any(self._others.are_on(parameter) for parameter in parameters if parameter is not None)

    @torch.no_grad()
    def add(self, uses: Sequence[Sequence[Product | ComputedGradient]], ready: bool) -> None:
        """See ``store.Accumulator``.

        Several gradients of a weight in one microbatch (output layer with multi-token prediction) are first summed in
        the weight's dtype, as autograd does. ``ready`` is unused, because the hooks count the gradients themselves.
        """
        for use in uses:
            if use and use[0].by_kernel:
                self._by_the_jobs_kernel(use)
            elif use:
                self._add(use[0].weight, sum_of(use))

    @torch.no_grad()
    def add_gradient(self, parameter: torch.Tensor, grad: torch.Tensor, ready: bool) -> None:
        """Accumulate a gradient that is no product, of the parameter's shape and dtype; ``ready`` as in ``add``."""
        self._add(parameter, grad)

    @torch.no_grad()
    def report(self, parameters: Iterable[torch.Tensor]) -> None:
        """Tell data parallelism that gradients were accumulated elsewhere."""
        for parameter in parameters:
            self._call_hook(parameter)

    def _add(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """Accumulate ``grad`` (shape and dtype of ``parameter``)."""
        if self._others.are_on(parameter):
            self._give_to_autograd(parameter, grad, is_added=False)
            return
        hook = self._hooks.get(parameter)
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad += grad
        if hook is not None:
            hook()

    def _give_to_autograd(self, parameter: Any, grad: torch.Tensor, is_added: bool) -> None:
        """Let autograd accumulate ``grad``, which calls all hooks in their order, those of data parallelism included.

        Args:
            is_added: whether the gradient is in ``main_grad`` already, and ``grad`` only stands for it.
        """
        is_wrapped = hasattr(parameter, "grad_added_to_main_grad")
        if is_wrapped:
            before, parameter.grad_added_to_main_grad = parameter.grad_added_to_main_grad, is_added
        torch.autograd.backward([parameter], [grad])
        if is_wrapped:
            parameter.grad_added_to_main_grad = before

    def _by_the_jobs_kernel(self, use: Sequence[Product | ComputedGradient]) -> None:
        """Accumulate directly into ``main_grad`` with the kernel of the job's ``gradient_accumulation_fusion``."""
        weight: Any = use[0].weight
        kernels = layers.fused_weight_gradient_mlp_cuda
        fp32 = weight.main_grad.dtype is torch.float32
        accumulate = kernels.wgrad_gemm_accum_fp32 if fp32 else kernels.wgrad_gemm_accum_fp16
        for each in use:
            if isinstance(each, ComputedGradient):
                weight.main_grad.add_(each.gradient)
            else:
                accumulate(each.x, each.grad_output, weight.main_grad)
        weight.grad_added_to_main_grad = True
        self._call_hook(weight)

    def _call_hook(self, parameter: Any) -> None:
        """Call the hooks of a parameter whose gradient is already in ``main_grad``."""
        if self.is_hooked(parameter):
            self._give_to_autograd(parameter, torch.zeros_like(parameter), is_added=True)
            return
        hook = self._hooks.get(parameter)
        if hook is None:
            return
        # The hook requires a gradient of the parameter's dtype. With this flag set, the hook does not add it, except
        # for a shared weight, where it adds this zero.
        before, parameter.grad_added_to_main_grad = parameter.grad_added_to_main_grad, True
        parameter.grad = stand_in_grad(parameter)
        hook()
        parameter.grad, parameter.grad_added_to_main_grad = None, before


def sum_of(use: Sequence[Product | ComputedGradient]) -> torch.Tensor:
    """The gradient of a weight in one microbatch, in the weight's dtype.

    autograd adds in this order: nodes that a gradient in the forward has made run before those of the forward.
    """
    if len(use) == 1:
        return use[0].gradient
    ordered = sorted(use, key=lambda each: isinstance(each, Product))
    return functools.reduce(torch.Tensor.add_, (each.gradient for each in ordered))

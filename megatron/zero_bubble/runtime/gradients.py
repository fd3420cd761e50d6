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
from megatron.zero_bubble.kernels import Kernels, select


class GradAccumulator:
    """Adds deferred gradients to their parameters as the autograd hooks of the job would have: the same bits."""

    with_bias = False

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

    def linear(
        self,
        weight: torch.nn.Parameter,
        bias: torch.Tensor | None,
        x: torch.Tensor,
        grad_output: torch.Tensor,
        fused: bool,
    ) -> None:
        """See ``linear.Accumulate``."""
        assert bias is None, "upstream reduces it at B"
        if fused:
            self._by_the_jobs_kernel(weight, x, grad_output)
        else:
            self._add(weight, grad_output.t().matmul(x))

    def flush(self) -> None:
        """Accumulate what was only collected; here nothing is."""

    def _add(self, weight: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Accumulate ``grad`` (shape and dtype of ``weight``)."""
        hook = self._hooks.get(weight)
        if weight.grad is None:
            weight.grad = grad
        else:
            weight.grad += grad
        if hook is not None:
            hook()

    def _by_the_jobs_kernel(self, weight: Any, x: torch.Tensor, grad_output: torch.Tensor) -> None:
        """Accumulate ``grad_output^T x`` straight into ``main_grad`` with the kernel that the job's own
        ``gradient_accumulation_fusion`` uses; ``x`` is (tokens, in), ``grad_output`` (tokens, out).
        """
        kernels = layers.fused_weight_gradient_mlp_cuda
        fp32 = weight.main_grad.dtype is torch.float32
        accumulate = kernels.wgrad_gemm_accum_fp32 if fp32 else kernels.wgrad_gemm_accum_fp16
        accumulate(x, grad_output, weight.main_grad)
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


class FusedAccumulator(GradAccumulator):
    """Adds the gradients of many linears in one call, each straight into ``main_grad`` in float32, without a temporary
    and without a rounding to the weight's dtype in between.

    It works for its users as apex's ``fused_weight_gradient_mlp_cuda`` does, and takes its place.

    Args:
        kernels: see ``kernels.reference``; None selects by the device of the first weight.
    """

    with_bias = True

    def __init__(self, kernels: Kernels | None = None) -> None:
        super().__init__()
        self._kernels = kernels
        self._weights: list[torch.nn.Parameter] = []
        self._biases: list[torch.Tensor | None] = []
        self._inputs: list[torch.Tensor] = []
        self._grad_outputs: list[torch.Tensor] = []

    def linear(
        self,
        weight: torch.nn.Parameter,
        bias: torch.Tensor | None,
        x: torch.Tensor,
        grad_output: torch.Tensor,
        fused: bool,
    ) -> None:
        """Collect them until ``flush``."""
        self._weights.append(weight)
        self._biases.append(bias)
        self._inputs.append(x)
        self._grad_outputs.append(grad_output)

    @torch.no_grad()
    def flush(self) -> None:
        if not self._weights:
            return
        if self._kernels is None:
            self._kernels = select(self._weights[0].device.type)
        main_grads = [_main_grad(weight) for weight in self._weights]
        bias_grads = [main_grads[0].new_empty(0) if bias is None else _main_grad(bias) for bias in self._biases]
        self._kernels.ops.wgrad_accumulate_many(self._inputs, self._grad_outputs, main_grads, bias_grads)
        self._inputs.clear()
        self._grad_outputs.clear()
        for weight, bias in zip(self._weights, self._biases, strict=True):
            self._tell(weight)
            if bias is not None:
                self._tell(bias)
        self._weights.clear()
        self._biases.clear()


def _main_grad(parameter: Any) -> torch.Tensor:
    """Where a gradient is accumulated: Megatron's buffer, or the parameter's own ``grad``."""
    if hasattr(parameter, "main_grad"):
        return parameter.main_grad
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


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

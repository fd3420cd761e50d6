"""The B/W split of megatron-core's own linears, through the deferral door they already have.

``tensor_parallel.layers.linear_with_grad_accumulation_and_async_allreduce`` appends the output gradient to a
``grad_output_buffer`` instead of computing the weight gradient when it is given one (made for
``--defer-embedding-wgrad-compute``). Every column, row and output layer looks that function up in its module at each
call, so one replaced name splits them all, and no autograd function is copied or changed. Three things make it exact:

* the weight goes in detached: autograd then has no edge to it, and no gradient hook of data parallelism can fire at B;
* the bias stays outside, where its gradient is reduced as the fused function does it (over the flattened tokens), at B
  or, where the accumulator wants it, with the weight's;
* W repeats the fused function's arithmetic: gather the input under sequence parallelism, flatten, one GEMM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel import layers

from megatron.zero_bubble.wgrad.store import Product, WgradStore


class Choice(Protocol):
    """Which gradients can wait for W.

    Attributes:
        with_bias: whether the gradient of a bias waits as well.
    """

    with_bias: bool

    def defers(self, weight: torch.nn.Parameter) -> bool:
        """Whether the gradients of ``weight`` can wait for W."""
        ...


class DeferredLinear:
    """The weight gradient of one linear in one microbatch; ``append`` is the call that the upstream function makes."""

    __slots__ = (
        "_bias",
        "_fused",
        "_gathered",
        "_grad_output",
        "_handle",
        "_input",
        "_store",
        "_tp_group",
        "weight",
    )

    def __init__(
        self,
        store: WgradStore,
        x: torch.Tensor,
        weight: torch.nn.Parameter,
        bias: torch.Tensor | None,
        fused: bool,
        tp_group: torch.distributed.ProcessGroup | None,
    ) -> None:
        self._store = store
        self._input = x
        self.weight = weight
        self._bias = bias
        self._fused = fused
        self._tp_group = tp_group  # set under sequence parallelism: the input is a shard
        self._grad_output: torch.Tensor | None = None
        self._gathered: torch.Tensor | None = None
        self._handle: torch.distributed.Work | None = None

    def __len__(self) -> int:
        return 0

    def append(self, grad_output: torch.Tensor) -> None:
        """Called by upstream's backward in place of its weight-gradient GEMM."""
        self._grad_output = grad_output
        self._store.put(self)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The input and, after B, the gradient of the output."""
        return (self._input,) if self._grad_output is None else (self._input, self._grad_output)

    @property
    def num_elements(self) -> int:
        """Of the weight."""
        return self.weight.numel()

    @property
    def gathers(self) -> bool:
        """Whether the input is a shard."""
        return self._tp_group is not None

    def prefetch(self) -> None:
        """Start gathering the input over the tensor-parallel group, into a buffer of our own: upstream's shared one
        is overwritten by the next layer.
        """
        if self._tp_group is None:
            return
        shape = (self._input.size(0) * self._tp_group.size(), *self._input.shape[1:])
        self._gathered = torch.empty(shape, dtype=self._input.dtype, device=self._input.device)
        self._handle = layers.dist_all_gather_func(
            self._gathered, self._input.detach(), group=self._tp_group, async_op=True
        )

    @torch.no_grad()
    def run(self) -> Iterable[Product]:
        """One GEMM of (out, tokens) x (tokens, in), its operands flattened."""
        assert self._grad_output is not None, "W runs after its B"
        x = self._input
        if self._handle is not None:
            self._handle.wait()
            assert self._gathered is not None
            x = self._gathered
        x, grad_output = (tensor.flatten(0, -2).contiguous() for tensor in (x, self._grad_output))
        return (Product(self.weight, self._bias, x, grad_output, self._fused),)


class _AddBias(torch.autograd.Function):
    """``y + bias``, whose bias gradient is summed over the flattened tokens as upstream's linear sums it."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return y + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, grad.reshape(-1, grad.shape[-1]).sum(dim=0)


def split_linear(original: Callable[..., torch.Tensor], store: WgradStore, choice: Choice) -> Callable:
    """The replacement for ``linear_with_grad_accumulation_and_async_allreduce``.

    It defers only where a W will come (``store.deferring``), where the weight is a leaf that wants a gradient and the
    input another, and where ``choice`` agrees; whatever else, upstream's own deferral of the embedding included,
    runs as it was.
    """

    @functools.wraps(original)
    def linear(
        input: torch.Tensor,
        weight: torch.nn.Parameter,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[torch.Tensor] | None = None,
        wgrad_deferral_limit: int | None = 0,
        **rest: Any,
    ) -> torch.Tensor:
        split = (
            store.deferring
            and grad_output_buffer is None
            and torch.is_grad_enabled()
            and input.requires_grad
            and weight.requires_grad
            and weight.is_leaf
            and choice.defers(weight)
        )
        if not split:
            return original(
                input,
                weight,
                bias,
                gradient_accumulation_fusion,
                allreduce_dgrad,
                sequence_parallel,
                grad_output_buffer,
                wgrad_deferral_limit,
                **rest,
            )
        tp_group = layers.get_tensor_model_parallel_group_if_none(rest.get("tp_group")) if sequence_parallel else None
        waits = choice.with_bias and bias is not None and bias.requires_grad and bias.is_leaf
        deferred = DeferredLinear(store, input, weight, bias if waits else None, gradient_accumulation_fusion, tp_group)
        # "Fused accumulation" of a detached weight: upstream then returns no weight gradient and has no main_grad.
        y = original(
            input, weight.detach(), None, True, allreduce_dgrad, sequence_parallel, deferred, 0, **rest
        )  # fmt: skip
        if bias is None:
            return y
        return y.add_(bias.detach()) if waits else _AddBias.apply(y, bias)  # nobody else holds y

    return linear

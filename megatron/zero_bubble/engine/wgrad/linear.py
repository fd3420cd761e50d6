"""Splits the backward of megatron-core's own linears into B and W, through upstream's deferral hook.

If ``tensor_parallel.layers.linear_with_grad_accumulation_and_async_allreduce`` gets a ``grad_output_buffer`` (made for
``--defer-embedding-wgrad-compute``), it appends the output gradient to it instead of computing the weight gradient.
Every column, row and output layer looks that function up in its module at each call, so replacing one name splits them
all, without a copy or change of any autograd function. Three measures keep the result exact:

* The weight is passed detached, so autograd has no edge to it and no data-parallel gradient hook runs at B. It still
  requires a gradient, although none is computed: that decides which product computes the input gradient.
* The bias is added outside. Its gradient is summed as in the fused function (over the flattened tokens), at B or, if
  the accumulator supports it, together with the weight gradient.
* W repeats the fused function's arithmetic: gather the input under sequence parallelism, flatten, one GEMM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel import layers

from megatron.zero_bubble.engine.wgrad.gradients import DeferredGradient, Product
from megatron.zero_bubble.engine.wgrad.operands import copied
from megatron.zero_bubble.engine.wgrad.saving import SavedInput
from megatron.zero_bubble.engine.wgrad.store import WgradStore


class Deferral(Protocol):
    """Decides which gradients are deferred to W.

    Attributes:
        with_bias: whether bias gradients are deferred too.
    """

    with_bias: bool

    def defers(self, weight: torch.nn.Parameter) -> bool:
        """Whether the gradients of ``weight`` can be deferred to W."""
        ...


class Use:
    """One use of a linear in one microbatch, from F on; passed to upstream's function as its buffer.

    Args:
        passed: the weight as upstream's function gets it: detached.
        saved: the input.
        bias: None unless its gradient waits for W.
        fused: whether the job uses fused accumulation.
        tp_group: set under sequence parallelism, when the input is a shard.

    Attributes:
        answer: set while the gradients are asked for by name; takes a parameter and its gradient.
    """

    __slots__ = (
        "_fused",
        "_is_differentiated",
        "_origin",
        "_saved",
        "_store",
        "_tp_group",
        "answer",
        "bias",
        "passed",
        "weight",
    )

    def __init__(
        self,
        store: WgradStore,
        weight: torch.nn.Parameter,
        passed: torch.Tensor,
        saved: SavedInput,
        bias: torch.Tensor | None,
        fused: bool,
        tp_group: torch.distributed.ProcessGroup | None,
    ) -> None:
        self._store = store
        self._origin = store.origin
        self.weight, self.passed, self.bias = weight, passed, bias
        self._saved = saved
        self._fused = fused
        self._tp_group = tp_group
        self._is_differentiated = False
        self.answer: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    def __len__(self) -> int:
        return 0

    def append(self, grad_output: torch.Tensor) -> None:
        """Store the deferred gradient; called by upstream's backward instead of its weight-gradient GEMM.

        Raises:
            UserError: a backward accumulates gradients outside of the B of the microbatch.
        """
        if self.answer is not None:
            self._compute(grad_output.detach(), self.answer)
        elif self._store.wants(self._origin, self.weight, self.passed):
            grad_output = self._store.shared.kept(self.weight, grad_output)
            self._store.put(self._deferred(grad_output))
        else:
            self._saved.drop()
            if torch.is_grad_enabled() and not self._is_differentiated:
                self._is_differentiated = True
                self.passed.register_hook(self._add_derivative)

    def _deferred(self, grad_output: torch.Tensor) -> DeferredLinear:
        x = self._saved.take().detach()
        return DeferredLinear(self.weight, self.bias, x, grad_output, self._fused, self._tp_group)

    def _compute(self, grad_output: torch.Tensor, answer: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        deferred = self._deferred(grad_output)
        deferred.prefetch()
        for product in deferred.run():
            answer(self.weight, product.gradient)
            if self.bias is not None:
                answer(self.bias, product.bias_gradient)

    def _add_derivative(self, grad: torch.Tensor | None) -> None:
        """Store the gradient that reaches the weight through an input gradient, which a loss was computed from."""
        if grad is not None and self._store.wants(self._origin, self.weight, self.passed):
            self._store.put(DeferredGradient(self.weight, grad.detach()))


class DeferredLinear:
    """The weight gradient of one use of a linear in one microbatch, from B until W.

    The operands have no graph. In float32, upstream's cross entropy computes the gradient of the logits in the logits
    themselves: with their graph, they would refer to themselves, and be freed only by garbage collection.
    """

    __slots__ = ("_bias", "_fused", "_gathered", "_handle", "_operands", "_tp_group", "weight")

    def __init__(
        self,
        weight: torch.nn.Parameter,
        bias: torch.Tensor | None,
        x: torch.Tensor,
        grad_output: torch.Tensor,
        fused: bool,
        tp_group: torch.distributed.ProcessGroup | None,
    ) -> None:
        self.weight = weight
        self._bias = bias
        self._operands: tuple[torch.Tensor, ...] = x, grad_output
        self._fused = fused
        self._tp_group = tp_group
        self._gathered: torch.Tensor | None = None
        self._handle: torch.distributed.Work | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The input and the output gradient; none after W."""
        return self._operands

    operands = tensors

    def copy(self, written: torch.Tensor) -> None:
        """See ``Deferred``."""
        self._operands = tuple(copied(operand, written) for operand in self._operands)

    @property
    def num_elements(self) -> int:
        return self.weight.numel()

    @property
    def gathers(self) -> bool:
        """Whether the input is a shard that W must gather."""
        return self._tp_group is not None

    def prefetch(self) -> None:
        """Start to gather the input over the tensor-parallel group.

        It uses a separate buffer, because the next layer would overwrite upstream's shared one.
        """
        if self._tp_group is None:
            return
        x = self._operands[0]
        shape = (x.size(0) * self._tp_group.size(), *x.shape[1:])
        self._gathered = torch.empty(shape, dtype=x.dtype, device=x.device)
        self._handle = layers.dist_all_gather_func(self._gathered, x, group=self._tp_group, async_op=True)

    @torch.no_grad()
    def run(self) -> Iterable[Product]:
        """The flattened operands of one GEMM, (out, tokens) x (tokens, in)."""
        (x, grad_output), self._operands = self._operands, ()
        if self._handle is not None:
            self._handle.wait()
            assert self._gathered is not None
            x, self._gathered, self._handle = self._gathered, None, None
        x, grad_output = (tensor.flatten(0, -2).contiguous() for tensor in (x, grad_output))
        return (Product(self.weight, self._bias, x, grad_output, self._fused),)


class _AddBias(torch.autograd.Function):
    """``y + bias``, with the bias gradient summed over the flattened tokens as in upstream's linear."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return y + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Over a strided gradient, a GPU may add in another order than upstream, which makes it contiguous first.
        return grad, grad.contiguous().flatten(0, -2).sum(dim=0)


def split_linear(original: Callable[..., torch.Tensor], store: WgradStore, choice: Deferral) -> Callable:
    """The replacement for ``linear_with_grad_accumulation_and_async_allreduce``.

    It defers the weight gradient only if the running pass has a W (``store.deferring``), weight and input require
    gradients, the weight is a leaf, and ``choice`` agrees. All other calls, including upstream's own deferral of the
    embedding gradient, are passed on to ``original`` unchanged.
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
        # Unless the matrix requires a gradient, torch.matmul multiplies (s, b, v), with strides that do not fold into
        # (s * b, v), by (v, h) as s products. The gradient of logits that leave the model as (b, s, v) has such ones.
        passed = weight.detach().requires_grad_()
        saved = SavedInput(input, passed, weight)
        use = Use(store, weight, passed, saved, bias if waits else None, gradient_accumulation_fusion, tp_group)
        with saved.around():
            # With "fused accumulation" and a weight without main_grad, upstream returns no weight gradient.
            y = original(input, passed, None, True, allreduce_dgrad, sequence_parallel, use, 0, **rest)
        saved.forwarded()
        if bias is None:
            return y
        return y.add_(bias.detach()) if waits else _AddBias.apply(y, bias)  # y has no other users

    return linear

"""A fake of the grouped linear of TransformerEngine's fused operations, and of megatron-core's experts that use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.helpers.engine import GroupedLinear, WeightGradStore


class Grouped:
    """The tokens of all experts in one piece, in high precision. It is no ``torch.Tensor``."""

    quantizer = None

    def __init__(self, rowwise_data: torch.Tensor, splits: list[int]) -> None:
        self.rowwise_data, self.splits = rowwise_data, splits

    def get_data_tensors(self) -> tuple[torch.Tensor]:
        return (self.rowwise_data,)


class FusedGroupedLinear(torch.nn.Module):
    """The operation of ``transformer_engine.pytorch.ops``.

    It always accumulates into ``main_grad``, and computes the gradients of biases in B.
    megatron-core builds it on the meta device, and gives it the parameters of a ``GroupedLinear``.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: str = "cpu",
        accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__()
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        self.is_grouped = False  # as on new GPUs
        self.accumulates, self.num_groups = accumulate_into_main_grad, num_groups
        for number in range(num_groups):
            weight = torch.nn.Parameter(torch.randn(out_features, in_features, device=device))
            weight.skip_backward_post_hook = self.wgrad_store.delay_wgrad_compute()  # type: ignore[attr-defined]
            self.register_parameter(f"weight{number}", weight)
            self.register_parameter(f"bias{number}", None)
            if bias:
                self.register_parameter(f"bias{number}", torch.nn.Parameter(torch.randn(out_features, device=device)))

    def forward(self, x: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
        own = [getattr(self, f"{kind}{number}") for kind in ("weight", "bias") for number in range(self.num_groups)]
        return _MultiplyFused.apply(x, self, splits, *own)

    def backward_dw(self) -> None:
        if not self.wgrad_store.delay_wgrad_compute() or self.wgrad_store.context.empty():
            return
        _, (_, _, outs) = self.wgrad_store.pop()
        for number, out in enumerate([] if self.accumulates else outs):
            weight = getattr(self, f"weight{number}")
            weight.grad = out.to(weight.dtype)
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


class _MultiplyFused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, operation: Any, splits: Sequence[int], *both: Any) -> Any:
        weights, biases = both[: len(splits)], both[len(splits) :]
        ctx.save_for_backward(x)
        ctx.operation, ctx.splits, ctx.weights, ctx.biases = operation, list(splits), weights, biases
        parts = zip(x.split(ctx.splits), weights, biases, strict=True)
        return torch.cat([part @ w.t() if b is None else part @ w.t() + b for part, w, b in parts])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        operation, weights = ctx.operation, ctx.weights
        (x,) = ctx.saved_tensors
        xs, grads = list(x.split(ctx.splits)), grad.split(ctx.splits)  # a tuple
        bias_grads = [None if b is None else g.sum(0) for b, g in zip(ctx.biases, grads, strict=True)]
        x_grad = torch.cat([g @ w for g, w in zip(grads, weights, strict=True)])
        results: list[Any] = [None] * len(weights)
        if weights[0].requires_grad:
            accumulates = operation.accumulates
            outs = [w.main_grad if accumulates else torch.full_like(w, torch.nan) for w in weights]

            def multiply(xs: Any, grads: Any, outs: Any) -> None:
                both = [one.rowwise_data.split(one.splits) if isinstance(one, Grouped) else one for one in (xs, grads)]
                for x, grad, out in zip(*both, outs, strict=True):
                    product = grad.t().to(out.dtype) @ x.to(out.dtype)
                    out.add_(product) if accumulates else out.copy_(product)

            if is_delayed := operation.wgrad_store.delay_wgrad_compute():
                own = [Grouped(one.detach(), ctx.splits) for one in (x, grad)] if operation.is_grouped else [xs, grads]
                operation.wgrad_store.put([*own, outs], multiply)
            else:
                multiply(xs, grads, outs)
            for weight in weights if accumulates else ():
                weight.grad_added_to_main_grad = True
            results = (
                [torch.full_like(w, torch.nan) for w in weights] if accumulates else results if is_delayed else outs
            )
        return x_grad, None, None, *results, *bias_grads


class FusedExperts(torch.nn.Module):
    """A grouped linear whose weights megatron-core gives to a fused operation in the first forward."""

    def __init__(self, num: int, in_features: int, out_features: int, is_grouped: bool = False, **options: Any) -> None:
        super().__init__()
        self.linear = GroupedLinear(num, in_features, out_features, **options)
        self._shape, self._is_grouped = (num, in_features, out_features), is_grouped
        self._operation: Any = None

    def forward(self, x: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
        if self._operation is None:
            linear = self.linear
            accumulate = linear.fuse_wgrad_accumulation
            operation = FusedGroupedLinear(
                *self._shape,
                bias=linear.use_bias,
                device="meta",
                accumulate_into_main_grad=accumulate,
                delay_wgrad_compute=False,
            )
            for name, parameter in linear.named_parameters(recurse=False):
                operation.register_parameter(name, parameter)
            operation.is_grouped = self._is_grouped
            self._operation = (operation,)  # not a part of the module
        return self._operation[0](x, splits)

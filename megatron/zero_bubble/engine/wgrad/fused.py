"""Accumulates the weight gradients of many linears in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.zero_bubble.engine.kernels import compare_ranks, select
from megatron.zero_bubble.engine.platforms.streams import Inline, SideStream
from megatron.zero_bubble.engine.wgrad.accumulate import GradAccumulator, sum_of
from megatron.zero_bubble.engine.wgrad.gradients import Given, Product


class FusedAccumulator(GradAccumulator):
    """Accumulates the gradients of many linears in one call, directly into ``main_grad`` in float32.

    There is no temporary and no rounding to the weight's dtype. It replaces apex's ``fused_weight_gradient_mlp_cuda``
    if the job uses that.

    Args:
        side_stream: maps a device type to the stream for gradients that are not needed at once; default: inline.
    """

    with_bias = True

    def __init__(self, side_stream: Callable[[str], SideStream] = lambda device_type: Inline()) -> None:
        super().__init__()
        self._make_stream = functools.cache(side_stream)
        self._stream: SideStream = Inline()
        self._has_compared = False

    def connect(self, device: torch.device) -> None:
        """Log, in the first iteration, which ranks have no compiled ops; a collective call."""
        if not self._has_compared:
            compare_ranks(device.type)
            self._has_compared = True

    def add(self, uses: Sequence[Sequence[Product | Given]], ready: bool) -> None:
        """Accumulate all products in one call: at once if ``ready``, else on the side stream.

        Other gradients, and those of parameters with hooks, which see the gradient of one microbatch, follow one by
        one.
        """
        together = [use for use in uses if use and not self._is_alone(use)]
        if len(together) < len(uses):
            self._add_alone([use for use in uses if use and self._is_alone(use)], ready)
        products = [product for use in together for product in use if isinstance(product, Product)]
        if ready:
            self.join()
            self._accumulate(products)
            for use in together:
                for parameter in (use[0].weight, use[0].bias):
                    if parameter is not None:
                        self._call_hook(parameter)
        elif products:
            operands = [tensor for product in products for tensor in (product.x, product.grad_output)]
            self._stream = self._make_stream(operands[0].device.type)
            self._stream.run(lambda: self._accumulate(products), operands)

    def _is_alone(self, use: Sequence[Product | Given]) -> bool:
        return self.is_hooked(use[0].weight, use[0].bias) or any(isinstance(each, Given) for each in use)

    @torch.no_grad()
    def _add_alone(self, uses: Sequence[Sequence[Product | Given]], ready: bool) -> None:
        """Accumulate the gradients of ``uses`` after all so far, which may be of the same weights."""
        self.join()
        for use in uses:
            self.add_gradient(use[0].weight, sum_of(use), ready)
            if use[0].bias is not None:
                grads = [each.bias_gradient for each in use if isinstance(each, Product)]
                self.add_gradient(use[0].bias, functools.reduce(torch.Tensor.add_, grads), ready)

    @torch.no_grad()
    def add_gradient(self, parameter: torch.Tensor, grad: torch.Tensor, ready: bool) -> None:
        """Accumulate a gradient that is no product, after all products so far, which may be of the same weight."""
        self.join()
        if self.is_hooked(parameter):
            self._give_to_autograd(parameter, grad, is_added=False)
            return
        main_grad_of(parameter).add_(grad)
        if ready:
            self._call_hook(parameter)

    def join(self) -> None:
        """Make the current stream wait for the side stream."""
        self._stream.join()

    @torch.no_grad()
    def _accumulate(self, products: list[Product]) -> None:
        if not products:
            return
        main_grads = [main_grad_of(p.weight) for p in products]
        bias_grads = [main_grads[0].new_empty(0) if p.bias is None else main_grad_of(p.bias) for p in products]
        select(products[0].weight.device.type).ops.wgrad_accumulate_many(
            [p.x for p in products], [p.grad_output for p in products], main_grads, bias_grads
        )


def main_grad_of(parameter: Any) -> torch.Tensor:
    """The tensor in which gradients are accumulated: Megatron's buffer, or else the parameter's ``grad``."""
    if hasattr(parameter, "main_grad"):
        return parameter.main_grad
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad

"""Accumulates the weight gradients of many linears in one call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from megatron.zero_bubble.engine.kernels import compare_ranks, select
from megatron.zero_bubble.engine.wgrad.accumulate import GradAccumulator, sum_of
from megatron.zero_bubble.engine.wgrad.gradients import ComputedGradient, Product


class FusedAccumulator(GradAccumulator):
    """Accumulates the gradients of many linears in one call, directly into ``main_grad`` in float32.

    There is no temporary and no rounding to the weight's dtype. It replaces apex's ``fused_weight_gradient_mlp_cuda``
    if the job uses that.
    """

    with_bias = True

    def __init__(self) -> None:
        super().__init__()
        self._has_compared = False

    def connect(self, device: torch.device) -> None:
        """Log, in the first iteration, which ranks have no compiled ops; a collective call."""
        if not self._has_compared:
            compare_ranks(device.type)
            self._has_compared = True

    def add(self, uses: Sequence[Sequence[Product | ComputedGradient]], ready: bool) -> None:
        """Accumulate all products in one call, and call the hooks of their parameters if ``ready``.

        Other gradients, and those of parameters with hooks, which see the gradient of one microbatch, are accumulated
        one by one.
        """
        together = [use for use in uses if use and not self._is_alone(use)]
        if len(together) < len(uses):
            self._add_alone([use for use in uses if use and self._is_alone(use)], ready)
        self._accumulate([product for use in together for product in use if isinstance(product, Product)])
        if ready:
            for use in together:
                for parameter in (use[0].weight, use[0].bias):
                    if parameter is not None:
                        self._call_hook(parameter)

    def _is_alone(self, use: Sequence[Product | ComputedGradient]) -> bool:
        return self.is_hooked(use[0].weight, use[0].bias) or any(isinstance(each, ComputedGradient) for each in use)

    @torch.no_grad()
    def _add_alone(self, uses: Sequence[Sequence[Product | ComputedGradient]], ready: bool) -> None:
        for use in uses:
            self.add_gradient(use[0].weight, sum_of(use), ready)
            if use[0].bias is not None:
                grads = [each.bias_gradient for each in use if isinstance(each, Product)]
                self.add_gradient(use[0].bias, functools.reduce(torch.Tensor.add_, grads), ready)

    @torch.no_grad()
    def add_gradient(self, parameter: torch.Tensor, grad: torch.Tensor, ready: bool) -> None:
        """Accumulate a gradient that is no product."""
        if self.is_hooked(parameter):
            self._give_to_autograd(parameter, grad, is_added=False)
            return
        main_grad_of(parameter).add_(grad)
        if ready:
            self._call_hook(parameter)

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

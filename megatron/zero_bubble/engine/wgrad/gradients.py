"""Deferred weight gradients: what B leaves for W."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch

from megatron.zero_bubble.engine.wgrad.operands import copied


class Product(NamedTuple):
    """The operands of the weight gradient of one use of a linear.

    Attributes:
        weight: (out, in).
        bias: (out,); None if the linear has none or its gradient is not deferred.
        x: the input, (tokens, in).
        grad_output: (tokens, out), same dtype as ``x``.
        by_kernel: whether the job itself uses fused accumulation (``gradient_accumulation_fusion``).
    """

    weight: torch.nn.Parameter
    bias: torch.Tensor | None
    x: torch.Tensor
    grad_output: torch.Tensor
    by_kernel: bool = False

    @property
    def gradient(self) -> torch.Tensor:
        return self.grad_output.t().matmul(self.x)

    @property
    def bias_gradient(self) -> torch.Tensor:
        return self.grad_output.sum(dim=0)


class ComputedGradient(NamedTuple):
    """A gradient of one use of a linear that B has computed.

    Attributes:
        weight: (out, in).
        gradient: of the shape and dtype of ``weight``.
    """

    weight: torch.nn.Parameter
    gradient: torch.Tensor
    bias: None = None
    by_kernel: bool = False


class Deferred(Protocol):
    """The weight gradient of one use of one weight in one microbatch."""

    @property
    def weight(self) -> torch.nn.Parameter:
        """Identifies gradients of the same weight; if the object computes several weights, the first of them."""
        ...

    @property
    def num_elements(self) -> int:
        """Number of elements of all gradients that it computes."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether ``run`` gathers its input, and so needs more memory than ``tensors``."""
        ...

    def prefetch(self) -> None:
        """Start the communication that ``run`` needs, if any."""
        ...

    def run(self) -> Iterable[Product | ComputedGradient]:
        """The operands of the gradient, for the accumulator; empty if this call has accumulated it itself.

        Afterwards, the object refers to none of them.
        """
        ...

    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors that are held in memory until ``run``."""
        ...

    def operands(self) -> Iterable[torch.Tensor]:
        """Those of them that nothing may change in place until ``run``."""
        ...

    def copy(self, written: torch.Tensor) -> None:
        """Replace operands by copies if they have memory in common with ``written``."""
        ...


class DeferredGradient:
    """A gradient of a weight that B has computed, and that is added with those of W."""

    gathers = False

    def __init__(self, weight: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        self.weight = weight
        self._gradient: torch.Tensor | None = gradient
        self.num_elements = weight.numel()

    def prefetch(self) -> None:
        """Do nothing."""

    def tensors(self) -> Iterable[torch.Tensor]:
        return () if self._gradient is None else (self._gradient,)

    operands = tensors

    def copy(self, written: torch.Tensor) -> None:
        """See ``Deferred``."""
        if self._gradient is not None:
            self._gradient = copied(self._gradient, written)

    def run(self) -> Iterable[ComputedGradient]:
        gradient, self._gradient = self._gradient, None
        assert gradient is not None
        return (ComputedGradient(self.weight, gradient),)

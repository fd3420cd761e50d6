"""Small models of linears that defer their weight gradients: megatron-core's, and the fake TransformerEngine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import layers

from tests.helpers import engine
from tests.helpers.fused_operations import FusedExperts

IN, OUT, TOKENS = 6, 4, 5
STOCK = layers.linear_with_grad_accumulation_and_async_allreduce


class CoreLinears(torch.nn.Module):
    """megatron-core's linear: with a bias, and twice with one weight and no bias."""

    linear: Callable[..., torch.Tensor] = staticmethod(STOCK)

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(IN, IN))
        self.bias = torch.nn.Parameter(torch.randn(IN))
        self.second = torch.nn.Parameter(torch.randn(OUT, IN))

    def hidden(self, x: torch.Tensor, microbatch: int) -> torch.Tensor:
        return type(self).linear(x, self.first, self.bias, False, False, False, tp_group=None).tanh()

    def output(self, h: torch.Tensor, microbatch: int) -> torch.Tensor:
        first, second = (
            type(self).linear(each, self.second, None, False, False, False, tp_group=None) for each in (h, h.sin())
        )
        return first + second


class EngineLinears(torch.nn.Module):
    """Linears of the fake TransformerEngine, the first with its norm."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = engine.LayerNormLinear(IN, IN, **options)
        self.second = engine.Linear(IN, OUT, **options)

    def hidden(self, x: torch.Tensor, microbatch: int) -> torch.Tensor:
        return self.first(x, microbatch == 0).tanh()

    def output(self, h: torch.Tensor, microbatch: int) -> torch.Tensor:
        return self.second(h, microbatch == 0)


class EngineExperts(torch.nn.Module):
    """Grouped linears of the fake TransformerEngine."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = engine.GroupedLinear(2, IN, IN, **options)
        self.second = engine.GroupedLinear(2, IN, OUT, **options)

    def hidden(self, x: torch.Tensor, microbatch: int) -> torch.Tensor:
        return self.first(x, [2, TOKENS - 2], microbatch == 0).tanh()

    def output(self, h: torch.Tensor, microbatch: int) -> torch.Tensor:
        return self.second(h, [TOKENS - 1, 1], microbatch == 0)


class EngineFusedExperts(torch.nn.Module):
    """The same, with fused operations that multiply in the place of the grouped linears."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = FusedExperts(2, IN, IN, **options)
        self.second = FusedExperts(2, IN, OUT, **options)

    def hidden(self, x: torch.Tensor, microbatch: int) -> torch.Tensor:
        return self.first(x, [2, TOKENS - 2]).tanh()

    def output(self, h: torch.Tensor, microbatch: int) -> torch.Tensor:
        return self.second(h, [TOKENS - 1, 1])

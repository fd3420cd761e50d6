"""Tests of fused operations that multiply in the place of TransformerEngine's linears, on a fake engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.ir import Kind, Pass
from tests.engine.wgrad.test_transformer_engine import (
    IN,
    OUT,
    SPLIT_ORDER,
    TOKENS,
    Run,
    assert_same_bits,
    gradients,
    split,
    stock,
)
from tests.helpers import engine
from tests.helpers.fused_operations import FusedExperts, FusedGroupedLinear


class Fused(torch.nn.Module):
    """Two experts; in microbatch 1 the first one has no tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.experts = FusedExperts(2, IN, OUT, **options)

    def forward(self, x: torch.Tensor, microbatch: int) -> torch.Tensor:
        return self.experts(x, [0, TOKENS] if microbatch == 1 else [2, TOKENS - 2])


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("is_grouped", [False, True], ids=["lists", "one piece"])
@pytest.mark.parametrize(
    "order",
    [
        SPLIT_ORDER,
        "F0 F1 BW0 F2 BW1 F3 BW2 BW3",
        "F0 F1 BW0 F2 B1 F3 W1 BW2 B3 W3",
        "F0 F1 F2 F3 B2 B1 W2 W1 B0 W0 B3 W3",
    ],
    ids=["split", "fused", "mixed", "another backward first"],
)
def test_fused_experts_equal_undelayed_ones_in_bits_and_hooks(
    fused: bool, bias: bool, is_grouped: bool, order: str
) -> None:
    def make() -> torch.nn.Module:
        return Fused(is_grouped=is_grouped, fuse_wgrad_accumulation=fused, bias=bias)

    expected = stock(make, order)
    with split() as store:
        own = Run(make, False, store)
        assert_same_bits(own.passes(order), gradients(expected))
    assert all(torch.equal(grad, expected.input_grads[i]) for i, grad in own.input_grads.items())
    assert sorted(own.ddp.ready) == sorted(expected.ddp.ready), "each must be ready once, in the last microbatch"
    assert all(parameter.grad is None for parameter in own.ddp.parameters())
    assert not len(store)


def test_gradients_of_fused_experts_wait_for_w() -> None:
    with split() as store:
        own = Run(lambda: Fused(fuse_wgrad_accumulation=True, bias=False), False, store)
        own.passes("F0 B0")
        kept = sum(t.numel() for t in store.tensors(Pass(0, Kind.W, 0)))
        assert kept == TOKENS * (IN + OUT)
        assert not any(grad.any() for grad in gradients(own).values())
        own.passes("W0")
        assert not len(store) and all(bool(grad.any()) for grad in gradients(own).values())


def test_an_operation_with_weights_of_its_own_computes_them_in_b() -> None:
    """Data parallelism has hooked its weights as those of any other module."""

    class Alone(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = engine.Linear(IN, IN)  # whose hooks wait for W
            self.operation = FusedGroupedLinear(1, IN, OUT)

        def forward(self, x: torch.Tensor, microbatch: int) -> torch.Tensor:
            return self.operation(self.linear(x).tanh(), [TOKENS])

    expected = stock(Alone, SPLIT_ORDER)
    with split() as store:
        own = Run(Alone, False, store)
        own.passes("F0 B0")
        assert gradients(own)["operation.weight0"].any() and not gradients(own)["linear.weight"].any()
        assert_same_bits(own.passes(SPLIT_ORDER.replace("F0", "").replace("B0", "")), gradients(expected))


def test_frozen_experts_defer_nothing() -> None:
    def make() -> torch.nn.Module:
        module = Fused()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("weight" not in name)
        return module

    expected = stock(make, SPLIT_ORDER)
    with split() as store:
        assert_same_bits(Run(make, False, store).passes(SPLIT_ORDER), gradients(expected))


class Dense(torch.nn.Module):
    """A linear whose weight megatron-core gives to a fused operation without a queue, as in a dense MLP."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear = engine.Linear(IN, OUT, fuse_wgrad_accumulation=True, bias=False, **options)

    def forward(self, x: torch.Tensor, microbatch: int) -> torch.Tensor:
        return _Accumulate.apply(x, self.linear.weight)


class _Accumulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad.add_(grad.t() @ x)
        ctx.weight.grad_added_to_main_grad = True
        return grad @ ctx.weight, torch.full_like(ctx.weight, torch.nan)


def test_operations_without_a_queue_compute_their_gradients_in_b() -> None:
    expected, lines = stock(Dense, SPLIT_ORDER), []
    with split(lines.append) as store:
        own = Run(Dense, False, store)
        own.passes("F0 B0")
        assert not len(store) and gradients(own)["linear.weight"].any()
        assert_same_bits(own.passes(SPLIT_ORDER.replace("F0", "").replace("B0", "")), gradients(expected))
        assert own.ddp.ready == expected.ddp.ready
    (line,) = lines
    assert line.endswith("such as a fused operation, so their gradients are computed in B, not in W")

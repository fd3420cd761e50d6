"""Tests of the accumulation of weight gradients and of when data parallelism may reduce them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.wgrad import accumulate
from megatron.zero_bubble.engine.wgrad.gradients import Product


class Wrapped(torch.nn.Module):
    """Imitates a wrapper whose gradient hooks only autograd can call."""

    def no_sync(self) -> None:
        raise AssertionError("never called")


def test_chunks_are_not_identified_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulate, "id", lambda _chunk: 0, raising=False)  # imitates the reuse of a freed address
    accumulator = accumulate.GradAccumulator()
    accumulator.watch([torch.nn.Linear(2, 2)])
    with pytest.raises(UserError, match="DistributedDataParallel"):
        accumulator.watch([Wrapped()])


def test_fused_kernel_makes_a_weight_ready_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is used twice in the microbatch and becomes ready once."""
    weight: Any = torch.nn.Parameter(torch.zeros(1, 1))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(1, 1), False
    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=lambda x, grad, main_grad: main_grad.addmm_(grad.t(), x))
    monkeypatch.setattr(accumulate.layers, "fused_weight_gradient_mlp_cuda", kernel, raising=False)
    ready: list[None] = []
    accumulator = accumulate.GradAccumulator()
    accumulator._hooks[weight] = lambda: ready.append(None)
    product = Product(weight, None, torch.ones(1, 1), torch.ones(1, 1), by_kernel=True)
    accumulator.add([[product, product]], ready=True)
    assert weight.main_grad.item() == 2.0
    assert len(ready) == 1


def test_hooks_see_zeros_where_the_jobs_kernel_accumulates(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in stock, which lets autograd accumulate a stand-in."""
    weight: Any = torch.nn.Parameter(torch.zeros(1, 1))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(1, 1), False
    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=lambda x, grad, main_grad: main_grad.addmm_(grad.t(), x))
    monkeypatch.setattr(accumulate.layers, "fused_weight_gradient_mlp_cuda", kernel, raising=False)
    accumulator = accumulate.GradAccumulator()
    accumulator.watch([torch.nn.ParameterList([weight])])
    seen: list[Any] = []
    weight.register_hook(lambda grad: seen.append(grad.item()))
    weight.register_post_accumulate_grad_hook(lambda own: seen.append(own.grad_added_to_main_grad))
    product = Product(weight, None, torch.ones(1, 1), torch.ones(1, 1), by_kernel=True)
    accumulator.add([[product]], ready=True)
    assert seen == [0.0, True] and weight.main_grad.item() == 1.0

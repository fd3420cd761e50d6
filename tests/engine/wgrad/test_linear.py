"""Tests of a single split linear: which gradients wait for W, and cleanup after a failed W."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.zero_bubble.core.ir import Kind, Pass
from megatron.zero_bubble.engine.wgrad.accumulate import GradAccumulator
from megatron.zero_bubble.engine.wgrad.fused import FusedAccumulator
from megatron.zero_bubble.engine.wgrad.gradients import Product
from megatron.zero_bubble.engine.wgrad.linear import DeferredLinear, _AddBias, split_linear
from megatron.zero_bubble.engine.wgrad.store import WgradStore

F, B, W = (Pass(0, kind, 0) for kind in (Kind.F, Kind.B, Kind.W))


class _Linear(torch.autograd.Function):
    """Imitates upstream's linear with a deferral buffer: its backward stores the output gradient in the buffer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, buffer: Any) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.buffer = buffer
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.buffer.append(grad)
        return grad @ ctx.saved_tensors[0], None, None


def upstream(x: Any, weight: Any, bias: Any, *rest: Any, **named: Any) -> torch.Tensor:
    assert bias is None and weight.is_leaf, "bias and weight gradient must be handled outside"
    assert not isinstance(weight, torch.nn.Parameter), "autograd must have no edge to the parameter"
    return _Linear.apply(x, weight, rest[3])


def run(accumulate: Any, bias: torch.nn.Parameter | None) -> tuple[torch.Tensor, torch.nn.Parameter, WgradStore]:
    """Run a forward and a backward on fixed values; return the input, the weight and the store before W."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 4, generator=generator).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(3, 4, generator=generator))
    store = WgradStore(accumulate)
    linear = split_linear(upstream, store, accumulate)
    with store.defer(F):
        y = linear(x, weight, bias, False, False, False)
    with store.defer(B):
        (y * y).sum().backward()
    return x, weight, store


@pytest.mark.parametrize("make", [GradAccumulator, FusedAccumulator])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_split_linear_gradients_equal_autograds(make: Any, is_frozen: bool) -> None:
    bias = torch.nn.Parameter(torch.randn(3), requires_grad=not is_frozen)
    accumulate = make()
    x, weight, store = run(accumulate, bias)
    assert weight.grad is None
    assert (bias.grad is None) == (is_frozen or accumulate.with_bias), "a fused bias gradient must wait for W as well"
    store.run(W)
    own = [parameter.grad for parameter in (x, weight, bias)]
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    (torch.nn.functional.linear(*leaves) ** 2).sum().backward()
    for grad, leaf in zip(own[: 2 if is_frozen else 3], leaves, strict=False):
        assert grad is not None and leaf.grad is not None
        torch.testing.assert_close(grad, leaf.grad)
    assert not is_frozen or bias.grad is None
    assert not len(store)


def products(backward: Callable[[], object]) -> Counter[str]:
    """The matrix products that ``backward`` computes, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        backward()
    names = (event.name.removeprefix("aten::") for event in profile.events())
    return Counter(name for name in names if name in ("mm", "addmm", "bmm", "baddbmm", "mv", "dot"))


@pytest.mark.parametrize("b", [1, 2])
def test_gradients_of_any_strides_take_the_products_of_upstream(b: int) -> None:
    """Logits leave the model as (b, s, v), so the output layer gets a transposed gradient, which is one product."""
    stock = layers.linear_with_grad_accumulation_and_async_allreduce
    generator = torch.Generator().manual_seed(0)
    s, v, h = 24, 64, 16
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((s, b, h), (v, h), (v,)))
    grad = torch.randn(b, s, v, generator=generator).transpose(0, 1)
    found = []
    for accumulate in (None, GradAccumulator()):
        leaves = x.clone().requires_grad_(), *map(torch.nn.Parameter, (weight.clone(), bias.clone()))
        store = WgradStore(accumulate or GradAccumulator())
        linear = stock if accumulate is None else split_linear(stock, store, accumulate)
        with store.defer(F):
            y = linear(*leaves, False, False, False, tp_group=None)

        def backward(y: torch.Tensor = y, store: WgradStore = store) -> None:
            with store.defer(B):
                y.backward(grad)
            store.run(W)

        found.append((products(backward), [leaf.grad for leaf in leaves]))
    (of_stock, wanted), (of_split, own) = found
    assert of_split == of_stock == {"mm": 2}
    assert all(map(torch.equal, own, wanted))


class _Sums(TorchDispatchMode):
    """Collects whether the tensors that are summed over a dimension are contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.of_contiguous: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sum.dim_IntList:
            self.of_contiguous.append(args[0].is_contiguous())
        return func(*args, **(kwargs or {}))


def test_bias_gradient_is_summed_over_a_contiguous_gradient_as_upstream_does() -> None:
    """The strides decide the order of a GPU's additions, and so the bits."""
    bias = torch.nn.Parameter(torch.zeros(3))
    y = _AddBias.apply(torch.zeros(1, 7, 3), bias)
    strided = torch.randn(1, 3, 7).transpose(1, 2)
    with _Sums() as sums:
        y.backward(strided)
    assert sums.of_contiguous == [True]
    assert torch.equal(bias.grad, strided.contiguous().view(7, 3).sum(dim=0))


def test_failed_w_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A W fails after its first gradient; the restarted iteration begins without leftovers."""
    accumulate = FusedAccumulator()
    _, weight, store = run(accumulate, None)
    ran = DeferredLinear.run

    def fail(self: DeferredLinear) -> None:
        ran(self)
        raise MemoryError

    monkeypatch.setattr(DeferredLinear, "run", fail)
    with pytest.raises(MemoryError):
        store.run(W)
    assert not len(store), "the next iteration must start with an empty store"
    store.clear()
    assert weight.grad is None


def test_uses_within_a_microbatch_are_summed_first_as_in_autograd() -> None:
    weight = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 256.0)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    accumulator = GradAccumulator()
    accumulator.add([[Product(weight, None, one, 0.75 * one)] * 2], ready=False)
    # Added one by one, both would be lost to rounding: bfloat16 numbers near 256 are 2 apart.
    assert weight.grad.item() == 258.0


class _InPlace(torch.autograd.Function):
    """Imitates upstream's cross entropy in float32: the gradient of its input is its input, changed in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(grad)


def test_operands_are_freed_with_w_without_garbage_collection() -> None:
    """The gradient may be an output of the linear itself, and lead to its node, which refers to the operands."""
    accumulate = GradAccumulator()
    store = WgradStore(accumulate)
    linear, weight = split_linear(upstream, store, accumulate), torch.nn.Parameter(torch.ones(3, 4))
    gc.disable()
    try:
        with store.defer(F):
            y = linear(torch.ones(5, 2, 4).requires_grad_(), weight, None, False, False, False)
            loss = _InPlace.apply(y)
        del y
        with store.defer(B):
            loss.backward()
        del loss
        operands = [weakref.ref(tensor) for tensor in store.tensors(W)]
        assert len(operands) == 2
        store.run(W)
        assert [operand() for operand in operands] == [None, None]
    finally:
        gc.enable()
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((3, 4), 8.0 * 10))

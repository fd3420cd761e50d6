"""Tests of the operands of W, to which others may write between B and W: also megatron-core's own collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.ranks import RankPool


def next_to_a_linear(rank: int, gradients_of_first: float, split: bool) -> list[torch.Tensor]:
    """Gradients of two microbatches of a linear next to a branch whose gradient is reduced over two ranks, in place.

    Args:
        gradients_of_first: a factor of the first gradient.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers, mappings

    from megatron.zero_bubble.core.ir import Kind, Pass
    from megatron.zero_bubble.engine.wgrad.accumulate import GradAccumulator
    from megatron.zero_bubble.engine.wgrad.linear import split_linear
    from megatron.zero_bubble.engine.wgrad.operands import reducing
    from megatron.zero_bubble.engine.wgrad.store import WgradStore

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    try:
        group = parallel_state.get_tensor_model_parallel_group()
        accumulate = GradAccumulator()
        store = WgradStore(accumulate)
        linear: Any = layers.linear_with_grad_accumulation_and_async_allreduce
        weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4) + rank)
        grads = []
        with pytest.MonkeyPatch.context() as patch:
            if split:
                linear = split_linear(linear, store, accumulate)
                patch.setattr(mappings, "_reduce", reducing(mappings._reduce, store.before_writing))
            for microbatch in range(2):
                f, b, w = (Pass(0, kind, microbatch) for kind in (Kind.F, Kind.B, Kind.W))
                with store.defer(f):
                    leaf = torch.full((5, 2, 4), microbatch + 1.0).requires_grad_()
                    x = leaf * 1
                    side = mappings.copy_to_tensor_model_parallel_region(x[..., :3] * 1, group)
                    y = x[..., :3] + (linear(x, weight, None, False, False, False, tp_group=group) + side)
                with store.defer(b):
                    y.backward(torch.full_like(y, 1.0 if microbatch else gradients_of_first))
                store.run(w)
                assert weight.grad is not None and leaf.grad is not None
                grads += [weight.grad.clone(), leaf.grad]
        return grads
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("gradients_of_first", [0.0, 1.0], ids=["first is zero", "first is reduced"])
def test_reduction_next_to_a_linear_does_not_change_its_gradient(ranks: RankPool, gradients_of_first: float) -> None:
    own, stock = (ranks.run(2, next_to_a_linear, gradients_of_first, split) for split in (True, False))
    for of_own, of_stock in zip(own, stock, strict=True):
        assert all(map(torch.equal, of_own, of_stock))


def test_plain_residuals_are_tried_once_and_never_copied_again() -> None:
    from megatron.core.tensor_parallel import layers

    from megatron.zero_bubble.core.ir import Kind, Pass
    from megatron.zero_bubble.engine.wgrad.accumulate import GradAccumulator
    from megatron.zero_bubble.engine.wgrad.linear import split_linear
    from megatron.zero_bubble.engine.wgrad.store import WgradStore

    store = WgradStore(GradAccumulator())
    linear = split_linear(layers.linear_with_grad_accumulation_and_async_allreduce, store, GradAccumulator())
    weights = [torch.nn.Parameter(torch.eye(4)) for _ in range(2)]
    shared = []
    for microbatch in range(3):
        with store.defer(Pass(0, Kind.F, microbatch)):
            x = torch.ones(5, 2, 4).requires_grad_() * 1
            inner = linear(x, weights[0], None, False, False, False, tp_group=None).tanh()
            y = x + linear(inner, weights[1], None, False, False, False, tp_group=None)
        grad = torch.ones_like(y)
        with store.defer(Pass(0, Kind.B, microbatch)):
            y.backward(grad)
        storages = {tensor.untyped_storage()._cdata for tensor in store.tensors(Pass(0, Kind.W, microbatch))}
        shared.append(grad.untyped_storage()._cdata in storages)
    assert shared == [False, True, True], "the first gets a copy, which turns out not to be needed"
    assert list(store.shared._is_written) == [weights[1]], "the other linear has its gradient for itself"

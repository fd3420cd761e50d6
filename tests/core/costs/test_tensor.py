"""Costs of tensor parallelism, by hand from those of the undivided model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import estimate
from megatron.zero_bubble.core.costs.model import Model, Recompute
from megatron.zero_bubble.core.costs.tensor import TensorParallelModel
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement

MODEL = Model((3, 5), 1024, 4096, 16, 8, 64, sequence=2048, microbatch=2, vocab_size=32_000)
A100, RATE = DEVICES["a100"], 300e6  # bytes per ms


@pytest.mark.parametrize(("recompute", "in_backward"), [("none", 2), ("selective", 2), ("full", 4)])
@pytest.mark.parametrize("degree", [2, 8])
def test_passes_are_divided_and_all_reduces_added(recompute: Recompute, in_backward: int, degree: int) -> None:
    """On two stages of 3 and 5 layers: 1/t of each pass, and two all-reduces of s b h elements per layer in F and B."""
    model, placement = replace(MODEL, recompute=recompute), Placement.linear(2)
    whole, kept = estimate(model, A100, placement)
    costs, memory = TensorParallelModel(model, degree).costs(A100, placement, RATE)
    one = 2 * (degree - 1) / degree * 2 * (2048 * 2 * 1024) / RATE
    for stage, layers in enumerate(model.layers):
        assert costs.forward_ms[stage] == pytest.approx(whole.forward_ms[stage] / degree + 2 * layers * one)
        assert costs.backward_ms[stage] == pytest.approx(whole.backward_ms[stage] / degree + in_backward * layers * one)
        assert costs.wgrad_ms[stage] == pytest.approx(whole.wgrad_ms[stage] / degree)
        assert memory.activation[stage] == pytest.approx(kept.activation[stage] / degree)
    assert TensorParallelModel(model, degree).sent(7) == pytest.approx((2 + in_backward) * one * RATE * 5 * 7)


def test_heads_must_be_divisible() -> None:
    with pytest.raises(UserError, match="query groups that it divides; got 8 for 16 GPUs"):
        TensorParallelModel(MODEL, 16).check()

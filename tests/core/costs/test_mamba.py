"""Estimates for the layers of hybrid models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import estimate, layer_costs
from megatron.zero_bubble.core.costs.mamba import Mamba
from megatron.zero_bubble.core.costs.model import Model

A100 = DEVICES["a100"]
DENSE = Model((2, 2), 4096, 16384, 32, 8, 128, 8192, 1, 64_000, gated=True)
HYBRID = replace(DENSE, pattern="M*-M")


def test_attention_and_mlp_are_the_halves_of_a_transformer_layer() -> None:
    whole = layer_costs(DENSE, A100).layers[0]
    _, attention, mlp, _ = layer_costs(HYBRID, A100).layers
    for name in ("forward_ms", "backward_ms", "wgrad_ms", "activation", "wgrad", "history"):
        assert getattr(attention, name) + getattr(mlp, name) == pytest.approx(getattr(whole, name))
    assert mlp.history == mlp.forward_attention == 0 < whole.forward_attention < attention.forward_attention
    assert HYBRID.attention_weights + HYBRID.mlp_weights == HYBRID.layer_weights


def test_weights_and_costs_follow_the_kinds_of_a_stages_layers() -> None:
    line = Placement.linear(2)
    vocabulary, mamba = 64_000 * 4096, Mamba().weights(4096)
    attention, mlp = HYBRID.attention_weights, HYBRID.mlp_weights
    assert HYBRID.stage_weights(line) == (mamba + attention + vocabulary, mlp + mamba + vocabulary)
    costs, memory = estimate(HYBRID, A100, line)
    parts = layer_costs(HYBRID, A100)
    assert costs.forward_ms[0] == pytest.approx(parts.layers[0].forward_ms + parts.layers[1].forward_ms)
    assert memory.wgrad[0] == pytest.approx(parts.layers[0].wgrad + parts.layers[1].wgrad)


def test_scan_stays_in_b_and_the_matrices_are_split() -> None:
    """8 groups of 128 states: the first matrix makes 2 * 8192 + 2 * 1024 + 128 features, the second one takes 8192."""
    work = Mamba().work(1000, 4096, 1, 1)
    matrices = 2.0 * 1000 * 4096 * (2 * 8192 + 2 * 1024 + 128 + 8192)
    assert work.wgrad == matrices
    scan = work.forward - matrices
    assert 0 < scan < matrices / 4 and work.backward == pytest.approx(matrices + 3 * scan)
    assert work.history == work.forward_scores == 0
    assert work.kept_for_wgrad < work.activation
    doubled = Mamba().work(2000, 4096, 1, 1)
    assert doubled.forward == 2 * work.forward  # unlike attention, which is quadratic in the length of a sequence


def test_slices_hand_on_a_state_of_every_sample() -> None:
    """128 numbers in float32 for each of 8192 features, and three inputs of the convolution in bf16."""
    layer = layer_costs(HYBRID, A100).layers[0]
    assert layer.states == 4 * 8192 * 128 + 2 * 3 * (8192 + 2 * 8 * 128)
    assert layer_costs(HYBRID, A100).layers[1].states == 0, "attention shares keys and values"
    larger = replace(HYBRID, microbatch=2, tensor_parallel=4, sequence=100)
    assert layer_costs(larger, A100).layers[0].states == layer.states / 2
    _, memory = estimate(HYBRID, A100, Placement.linear(2))
    assert memory.states == (layer.states, layer.states)


def test_sizes_and_parallelism_of_mamba_layers() -> None:
    assert Mamba(heads=64).weights(4096) < Mamba().weights(4096) == Mamba(heads=128).weights(4096)
    divided = Mamba().work(1000, 4096, 2, 2)
    whole = Mamba().work(1000, 4096, 1, 1)
    assert (2 * divided.activation, 2 * divided.kept_for_wgrad) == (whole.activation, whole.kept_for_wgrad)
    full = layer_costs(replace(HYBRID, recompute="full"), A100).layers[0]
    assert full.activation == 2 * HYBRID.tokens * 4096
    plain = layer_costs(HYBRID, A100).layers[0]
    assert full.backward_ms > plain.backward_ms + 0.7 * plain.forward_ms

"""Tests of the estimate for gated delta nets, and for the two kinds of attention of hybrid models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble.core.costs.attention import Latent
from megatron.zero_bubble.core.costs.delta import GatedDelta
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import layer_costs
from megatron.zero_bubble.core.costs.model import Model

A100 = DEVICES["a100"]
HYBRID = Model((4,), 2048, 8192, 16, 16, 128, 4096, 1, 50_304, pattern="G*-G")


def test_weights_of_a_gated_delta_net_are_those_of_qwen3_next() -> None:
    """Its layers project 2048 features to queries and keys of 2048, values and gates of 4096, and 2 x 32 numbers."""
    assert GatedDelta().weights(2048) == 2048 * (2048 + 2048 + 4096 + 4096 + 64) + 4096 * 2048
    assert HYBRID.weights_of("G") == GatedDelta().weights(2048)


def test_w_of_a_gated_delta_net_has_only_its_matrices() -> None:
    layer = layer_costs(HYBRID, A100).layers[0]
    rate = A100.tflops * A100.efficiency * 1e9
    assert layer.wgrad_ms == pytest.approx(2.0 * 4096 * GatedDelta().weights(2048) / rate)
    assert layer.backward_ms > layer.forward_ms > layer.wgrad_ms > 0
    wider = layer_costs(replace(HYBRID, delta=GatedDelta(value_heads=64)), A100).layers[0]
    assert wider.forward_ms > layer.forward_ms and wider.activation > layer.activation
    full = layer_costs(replace(HYBRID, recompute="full"), A100).layers[0]
    assert full.backward_ms == pytest.approx(layer.backward_ms + layer.forward_ms, rel=0.3)
    assert full.activation == HYBRID.message_bytes


def test_slices_hand_on_a_map_from_keys_to_values() -> None:
    layer = layer_costs(HYBRID, A100).layers[0]
    assert layer.states == 4 * 128 * 4096 + 2 * 3 * (2 * 2048 + 4096)


def test_latent_attention_is_that_of_its_letter() -> None:
    both = replace(HYBRID, pattern="+*-G", latent=Latent(rank=512, query_rank=1536))
    latent, plain = layer_costs(both, A100).layers[:2]
    assert plain == layer_costs(HYBRID, A100).layers[1]
    assert latent == layer_costs(replace(both, pattern="*G--"), A100).layers[0], "without +, all attention is latent"
    assert both.weights_of("+") != both.weights_of("*")

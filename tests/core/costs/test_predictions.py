"""Tests of the estimate for multi-token prediction: a layer with a projection, and one more output layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import estimate, layer_costs
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.predictions import prediction_parts, prediction_weights, with_predictions

MODEL = Model((2, 2), 1024, 4096, 16, 16, 64, 2048, 1, 50_304)
A100 = DEVICES["a100"]


def test_a_layer_of_prediction_is_a_layer_and_a_projection() -> None:
    layer, head, _ = prediction_parts(MODEL, A100)
    plain = layer_costs(MODEL, A100)
    # A projection from 2h to h, whose F, B and W take 2 operations per weight and token each.
    projection = 2 * 2048 * 2 * 1024**2 / (A100.tflops * 1e9 * A100.efficiency)
    assert layer.wgrad_ms == pytest.approx(plain.layers[0].wgrad_ms + projection)
    assert layer.forward_ms == pytest.approx(plain.layers[0].forward_ms + projection)
    assert head == plain.loss


def test_prediction_is_added_to_its_stage_and_to_the_last() -> None:
    placement = Placement.linear(2)
    parts = prediction_parts(MODEL, A100)
    layer, head, _ = parts
    costs, memory = estimate(MODEL, A100, placement)
    for counts in ((0, 1), (2, 0)):
        more, kept = with_predictions(costs, memory, counts, parts)
        for name in ("forward_ms", "backward_ms", "wgrad_ms"):
            first, last = (
                getattr(costs, name)[0] + counts[0] * getattr(layer, name),
                getattr(costs, name)[1] + counts[1] * getattr(layer, name) + sum(counts) * getattr(head, name),
            )
            assert getattr(more, name) == pytest.approx((first, last))
        assert kept.activation[0] == pytest.approx(memory.activation[0] + counts[0] * layer.activation)
    # As large a share of attention as without the projection, for equal layers.
    even, _ = with_predictions(costs, memory, (1, 0), parts._replace(layer=replace(layer, forward_ms=0.0)))
    assert even.forward_attention[0] == pytest.approx(costs.forward_attention[0])


def test_weights_of_prediction() -> None:
    embedding = 50_304 * 1024
    assert prediction_weights(MODEL, (0, 1)) == (0, MODEL.layer_weights + 2 * 1024**2 + embedding)
    assert prediction_weights(MODEL, (2, 0)) == (2 * (MODEL.layer_weights + 2 * 1024**2), 0)

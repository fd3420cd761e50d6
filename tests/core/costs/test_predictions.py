"""Tests of the estimate for multi-token prediction: a layer with a projection, and one more output layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import layer_costs
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


def test_predictions_are_one_more_part_whose_output_layers_are_on_the_last_stage() -> None:
    plain, (layer, head, _) = layer_costs(MODEL, A100), prediction_parts(MODEL, A100)
    for number in (1, 2):
        parts = with_predictions(plain, MODEL, A100, ("",) * number)
        assert parts.num_layers == 5 and parts.predictions == number
        for layout, at in (((2, 3), 1), ((5, 0), 0), ((4, 1), 1)):
            costs, memory = parts.on(layout)
            without, kept = plain.on([count - (stage == at) for stage, count in enumerate(layout)])
            for name in ("forward_ms", "backward_ms", "wgrad_ms"):
                more = [number * getattr(layer, name) * (stage == at) for stage in (0, 1)]
                more[1] += number * getattr(head, name)
                expected = [own + added for own, added in zip(getattr(without, name), more, strict=True)]
                assert getattr(costs, name) == pytest.approx(expected)
            assert memory.activation[0] == pytest.approx(kept.activation[0] + number * layer.activation * (at == 0))
    # As large a share of attention as without the projection, for equal layers.
    assert layer.forward_attention * layer.forward_ms == pytest.approx(
        plain.layers[0].forward_attention * plain.layers[0].forward_ms
    )


def test_predictions_of_a_hybrid_model_have_its_letters_and_are_on_the_last_stage() -> None:
    hybrid = replace(MODEL, pattern="M*-M")
    plain, parts = layer_costs(hybrid, A100), prediction_parts(hybrid, A100, "*-")
    whole = with_predictions(plain, hybrid, A100, ("*-",))
    assert whole.layers == plain.layers and not whole.predictions
    assert whole.loss.work_ms == pytest.approx(plain.loss.work_ms + parts.work_ms)
    assert parts.layer.forward_ms == pytest.approx(prediction_parts(MODEL, A100).layer.forward_ms), "a whole layer"
    weights = prediction_weights(hybrid, ("*-",), True)
    assert weights == prediction_weights(MODEL, ("",), True) > prediction_weights(hybrid, ("*",), True)


def test_layers_are_averaged_without_predictions() -> None:
    plain = layer_costs(replace(MODEL, pattern="*-*-"), A100)
    parts = with_predictions(replace(plain), MODEL, A100, ("",))
    averaged = parts.averaged()
    assert averaged.layers[:4] == plain.averaged().layers and averaged.layers[4] == parts.layers[4]


def test_weights_of_prediction() -> None:
    embedding, layer = 50_304 * 1024, MODEL.layer_weights + 2 * 1024**2
    assert prediction_weights(MODEL, ("",), True) == layer + embedding
    assert prediction_weights(MODEL, ("", ""), False) == 2 * layer
    assert prediction_weights(MODEL, (), True) == 0

"""Tests of adapters: no W where nothing is trained, a small one where an adapter is, no B below all that is trained."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.cli.shards import notes_on_replicas
from megatron.zero_bubble.core.costs.adapters import Adapters
from megatron.zero_bubble.core.costs.attention import Latent
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import layer_costs
from megatron.zero_bubble.core.costs.expert_layers import Experts
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.operations import operations
from megatron.zero_bubble.core.costs.precision import PRECISIONS
from megatron.zero_bubble.core.costs.predictions import prediction_parts, trained_prediction_weights
from megatron.zero_bubble.core.costs.static import ParameterBytes
from megatron.zero_bubble.planning.division import Division
from megatron.zero_bubble.planning.weights import ModelWeights

MODEL = Model((2, 2), 4096, 14336, 32, 8, 128, 4096, 1, 128_256, gated=True)
LORA = replace(MODEL, adapters=Adapters(16))
H100, LINE = DEVICES["h100"], Placement.linear(2)


def test_w_of_an_adapter_is_as_small_as_its_weights() -> None:
    whole, lora = layer_costs(MODEL, H100).layers[0], layer_costs(LORA, H100).layers[0]
    # Llama 3 8B: queries, keys and values are one layer, and so are the two halves of a gated unit.
    trained = LORA.trained_of("dense")
    assert trained == 16 * ((4096 + 6144) + (4096 + 4096) + (4096 + 2 * 14336) + (14336 + 4096))
    assert lora.wgrad_ms / whole.wgrad_ms == pytest.approx(trained / MODEL.layer_weights)
    assert whole.forward_ms < lora.forward_ms < 1.02 * whole.forward_ms
    one = layer_costs(replace(MODEL, adapters=Adapters(16, ("linear_qkv",))), H100).layers[0]
    assert 0 < one.wgrad_ms < lora.wgrad_ms and one.wgrad < lora.wgrad <= whole.wgrad
    assert not layer_costs(replace(MODEL, adapters=Adapters(16, ())), H100).layers[0].wgrad_ms


def test_ranks_that_divide_a_layer_divide_what_w_of_adapters_keeps() -> None:
    one = replace(MODEL, adapters=Adapters(16, ("linear_qkv",)))
    alone, divided = (
        layer_costs(of, H100).layers[0].wgrad for of in (one, replace(one, tensor_parallel=4, sequence_parallel=True))
    )
    assert alone == pytest.approx(2 * 4096 * (4096 + 6144 + 2 * 16))
    assert divided == pytest.approx(alone / 4)


def test_adapters_of_latent_projections_have_their_shapes() -> None:
    latent = replace(MODEL, latent=Latent(1536, 512), adapters=Adapters(8, ("linear_q_down_proj", "linear_kv_up_proj")))
    assert latent.trained_of("dense") == 8 * ((4096 + 1536) + (512 + 32 * 256))
    assert not replace(latent, adapters=Adapters(8, ("linear_qkv", "linear_q_proj"))).trained_of("dense")


def test_what_is_frozen_takes_fewer_operations() -> None:
    whole, lora = operations(MODEL, ("",)), operations(LORA, ("",))
    assert 2 / 3 * whole < lora < 0.72 * whole, "attention has no W that could be missing"
    assert operations(replace(MODEL, frozen=4)) == pytest.approx(
        operations(MODEL) - 2 / 3 * (operations(MODEL) - 6 * MODEL.vocab_size * MODEL.hidden)
    )


def test_the_output_layer_and_predictions_have_no_w() -> None:
    assert not layer_costs(LORA, H100).loss.wgrad_ms and layer_costs(MODEL, H100).loss.wgrad_ms
    head, layer = (getattr(prediction_parts(LORA, H100), name) for name in ("head", "layer"))
    assert not head.wgrad_ms and 0 < layer.wgrad_ms < 0.1 * layer.forward_ms


def test_frozen_products_in_low_precision_are_two_of_three() -> None:
    low = {name: replace(of, precision=PRECISIONS["tensorwise"]) for name, of in (("whole", MODEL), ("lora", LORA))}
    whole, lora = (layer_costs(low[name], H100).layers[0] for name in ("whole", "lora"))
    assert lora.backward_ms == pytest.approx(whole.backward_ms, rel=0.03), "B does not gain what W would have"


def test_layers_below_all_that_is_trained_have_only_f() -> None:
    experts = Experts(8, 2, 4096, parallel=4)
    costs = layer_costs(replace(MODEL, frozen=3, experts=experts), H100)
    for layer, parts in zip(costs.layers[:3], costs.experts, strict=False):
        assert layer.forward_ms > 0 and not layer.backward_ms + layer.wgrad_ms + layer.activation + layer.wgrad
        assert parts.dispatch and not parts.combine_grad + parts.experts_grad + parts.experts_wgrad
    passes, memory = costs.on((2, 2))
    assert passes.backward_ms[0] == 0 < passes.backward_ms[1]
    assert memory.activation[0] == costs.input_memory


def test_only_what_is_trained_has_gradients_and_states() -> None:
    each = ParameterBytes(2.0, 4.0, 12.0)
    lora, whole = (ModelWeights(of, Division(4), each, (2, 2)) for of in (LORA, MODEL))
    sizes, ends = lora.of_stages(LINE), MODEL.vocab_size * MODEL.hidden
    assert sizes.weights == whole.of_stages(LINE).weights
    assert sizes.gradients == pytest.approx((4.0 * 2 * LORA.trained_of("dense"),) * 2)
    assert lora.of_ranks(LINE)[0] == pytest.approx(sizes.weights[0] + sizes.gradients[0] + sizes.optimizer[0] / 2)
    frozen = ModelWeights(replace(MODEL, frozen=2), Division(4), each).of_stages(LINE)
    assert frozen.gradients == pytest.approx((0.0, 4.0 * (2 * MODEL.layer_weights + ends)))


def test_trained_experts_have_replicas_of_their_own_and_predictions_are_trained() -> None:
    each, experts = ParameterBytes(2.0, 4.0, 12.0), Experts(8, 2, 4096, parallel=4)
    model = replace(MODEL, experts=experts, frozen=2)
    held = ModelWeights(model, Division(4, predictions=(0, 1)), each, (8, 2), ("",))
    of_predictions, of_their_experts = trained_prediction_weights(model, ("",))
    assert of_predictions == model.weights_of("experts") + 2 * MODEL.hidden**2
    of_experts = 3 * model.expert_weights_of("experts")
    assert of_their_experts == of_experts / 3
    trained = 2 * model.weights_of("experts") + of_predictions + MODEL.vocab_size * MODEL.hidden
    states = 12.0 * ((trained - of_experts) / 8 + of_experts / 2)
    assert held.of_ranks(LINE)[1] == pytest.approx(held.of_stages(LINE).weights[1] + 4.0 * trained + states)
    lora = replace(LORA, experts=experts)
    assert 0 < lora.trained_experts_of("experts") < lora.trained_of("experts")


def test_what_is_frozen_is_said() -> None:
    lora = replace(MODEL, adapters=Adapters(8, ("linear_qkv", "linear_proj")), frozen=2)
    assert lora.assumed(H100) == (
        "Nothing is trained but adapters of rank 8 in linear_qkv, linear_proj.",
        "The embedding and the first 2 layers are frozen.",
    )
    options = argparse.Namespace(shard_weights=False)
    (note,) = notes_on_replicas(options, lora, 8, ParameterBytes(2, 4, 12))
    assert note.endswith("weights and optimizer (2 bytes per parameter, trained ones 18).")
    assert not MODEL.assumed(H100)

"""Tests of the estimate for layers with experts: only those that process a token, and the all-to-alls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.core.costs.devices import DEVICES, Device
from megatron.zero_bubble.core.costs.estimate import estimate, layer_costs
from megatron.zero_bubble.core.costs.expert_layers import Experts
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.predictions import (
    prediction_expert_weights,
    prediction_parts,
    prediction_weights,
    with_predictions,
)

DENSE = Model((2, 2), 1024, 4096, 16, 16, 64, 2048, 1, 50_304, gated=True)
H100 = DEVICES["h100"]
LINE = Placement.linear(2)
STATES = 2 * 2048 * 1024


def model(**own: object) -> Model:
    return replace(DENSE, experts=replace(Experts(16, 2, 512), **own))  # type: ignore[arg-type]


def test_one_expert_as_wide_as_the_mlp_is_a_dense_layer() -> None:
    """Besides its router, and its input, which it has as rows of its own, and orders."""
    dense, one = layer_costs(DENSE, H100), layer_costs(model(count=1, top_k=1, ffn=4096), H100)
    for name in ("forward_ms", "backward_ms", "wgrad_ms"):
        assert getattr(one.layers[0], name) == pytest.approx(getattr(dense.layers[0], name), rel=0.05)
    assert one.layers[0].activation == pytest.approx(dense.layers[0].activation + STATES + 8 * 2048)
    assert model(count=1, top_k=1, ffn=4096).stage_weights(LINE)[0] == pytest.approx(
        DENSE.stage_weights(LINE)[0] + 2 * 1024
    )


def test_only_experts_of_a_token_take_time_and_all_take_memory() -> None:
    few, many = model(fused=True), model(count=64, fused=True)  # so that each has as many launches
    one, other = (layer_costs(each, H100).layers[0] for each in (few, many))
    assert one.wgrad_ms == other.wgrad_ms and one.forward_ms == pytest.approx(other.forward_ms, rel=0.03)
    assert layer_costs(model(top_k=4, fused=True), H100).layers[0].wgrad_ms > one.wgrad_ms
    assert many.expert_weights(LINE) == pytest.approx([4 * count for count in few.expert_weights(LINE)])
    divided = model(parallel=8)
    assert divided.expert_weights(LINE) == pytest.approx([count / 8 for count in few.expert_weights(LINE)])
    # Shared experts and the router are on all ranks.
    rest = [all_ - own for all_, own in zip(few.stage_weights(LINE), few.expert_weights(LINE), strict=True)]
    assert rest == pytest.approx(
        [all_ - own for all_, own in zip(divided.stage_weights(LINE), divided.expert_weights(LINE), strict=True)]
    )


def test_all_to_alls_take_as_long_as_what_a_rank_sends_to_others() -> None:
    def ms(gpu: Device = H100, **own: object) -> float:
        return layer_costs(model(**own), gpu).experts[0].dispatch

    within, between = H100.node_gbs * 1e6, H100.network_gbs * 1e6
    assert ms() == 0
    assert ms(parallel=8) == pytest.approx(STATES * 2 * 7 / 8 / within)  # two copies per token, an eighth stays
    assert ms(parallel=16) == pytest.approx(STATES * 2 * 8 / 16 / between)  # half of them leave the node
    assert ms(parallel=8, tensor_parallel=4) == pytest.approx(STATES * 2 * 6 / 8 / between)  # two ranks per node
    assert ms(parallel=8, gathers=True) == pytest.approx(STATES * 7 / within)
    assert ms(replace(H100, domain=4, network_gbs=10), parallel=8) == pytest.approx(STATES * 2 * 4 / 8 / 10e6)
    assert ms(replace(H100, node_gbs=100), parallel=8) == pytest.approx(STATES * 2 * 7 / 8 / 100e6)
    # Sent once to a rank or node that has any of its experts: 1 - (1 - 1/n)^k of n.
    assert ms(parallel=8, sends_once=True) == pytest.approx(STATES * 7 * (1 - (7 / 8) ** 2) / within)
    assert ms(parallel=16, sends_once=True) == pytest.approx(STATES * 1 * (1 - (1 / 2) ** 2) / between)
    # Of eight experts from two of four groups, each of which is a node.
    assert ms(count=64, parallel=32, sends_once=True, top_k=8, groups=4, group_top_k=2) == pytest.approx(
        STATES * 3 * (2 / 4) / between, rel=1e-3
    )
    assert ms(replace(H100, domain=72), parallel=64) == pytest.approx(STATES * 2 * 63 / 64 / within)


def test_parts_of_a_stage_are_its_passes() -> None:
    """Dense layers count as attention, so a stage without experts has no other parts."""
    some = model(parallel=16, layers=(False, False, True, True), shared=512)
    costs, _ = estimate(some, H100, LINE)
    dense, _ = estimate(DENSE, H100, LINE)
    assert costs.forward_ms[0] == dense.forward_ms[0] and costs.experts[0].all_to_all == 0
    assert costs.experts[1].layers == 2 and 0.1 < costs.exposed_share < 0.9
    for own, f, b, w in zip(costs.experts, costs.forward_ms, costs.backward_ms, costs.wgrad_ms, strict=True):
        assert own.whole == pytest.approx(f + b + w)
        assert own.attention > 0 and own.attention_grad > 0 and own.attention_wgrad > 0
    again, _ = estimate(replace(some, recompute="full"), H100, LINE)
    assert again.experts[1].combine_grad == pytest.approx(2 * costs.experts[1].combine_grad)


def test_letters_of_a_hybrid_model_have_experts() -> None:
    hybrid = replace(model(parallel=16), pattern="*E*E")
    whole = model(parallel=16)
    assert hybrid.stage_weights(LINE) != whole.stage_weights(LINE)  # half as many layers
    assert [each.layers for each in layer_costs(hybrid, H100).experts] == [0, 1, 0, 1]
    halves = sum(layer.forward_ms for layer in layer_costs(hybrid, H100).layers[:2])
    assert halves == pytest.approx(layer_costs(whole, H100).layers[0].forward_ms)


def test_layers_of_prediction_have_the_experts_of_the_last_layer() -> None:
    some = model(parallel=16, layers=(False, False, True, True))
    costs, _ = with_predictions(layer_costs(some, H100), some, H100, ("",)).on((2, 3))
    assert costs.experts[1].layers == 3 and costs.experts[0].layers == 0
    assert costs.experts[1].whole == pytest.approx(costs.forward_ms[1] + costs.backward_ms[1] + costs.wgrad_ms[1])
    assert prediction_expert_weights(some, ("",)) == pytest.approx(some.expert_weights(LINE)[1] / 2)
    assert prediction_weights(some, ("",), True) > prediction_expert_weights(some, ("",))
    first = replace(some, experts=replace(some.experts, layers=(True, True, True, False)))  # type: ignore[type-var]
    assert not any(prediction_parts(first, H100).experts) and not prediction_expert_weights(first, ("",))


def test_tokens_are_permuted_around_all_to_alls() -> None:
    """Each permutation reads and writes the rows of F and of B."""

    def ms(**own: object) -> tuple[float, float, float]:
        part = layer_costs(model(**own), H100).experts[0]
        return part.experts, part.experts_grad, part.experts_wgrad

    once = 2 * 2 * STATES / (H100.memory_tbs * 1e9)  # two experts per token
    by_rank, by_kernel, one_each = (ms(parallel=8), ms(parallel=8, sends_once=True), ms(parallel=16))
    assert [a - b for a, b in zip(by_rank, by_kernel, strict=True)] == pytest.approx([2 * once, 2 * once, 0.0])
    assert one_each == pytest.approx(by_kernel), "one expert per rank needs no order among its rows"


def test_fused_experts_have_no_kernels_between_their_products() -> None:
    apart, fused = (layer_costs(model(parallel=8, fused=fused), H100) for fused in (False, True))
    assert fused.experts[0].experts < apart.experts[0].experts
    assert fused.experts[0].experts_grad < apart.experts[0].experts_grad
    assert fused.experts[0].experts_wgrad == apart.experts[0].experts_wgrad
    assert fused.layers[0].activation == apart.layers[0].activation
    assert fused.layers[0].forward_ms - fused.experts[0].experts == pytest.approx(
        apart.layers[0].forward_ms - apart.experts[0].experts
    )


def test_many_small_experts_take_the_time_of_their_launches() -> None:
    def wgrad(count: int, **own: object) -> float:
        return layer_costs(model(count=count, top_k=2, ffn=64, **own), H100).experts[0].experts_wgrad

    assert wgrad(256) == pytest.approx(2 * 256 * 0.005)
    assert wgrad(256, parallel=8) == pytest.approx(2 * 32 * 0.005)
    assert wgrad(256, fused=True) < wgrad(16), "one launch for all"
    large = [layer_costs(model(count=count, ffn=8192), H100).experts[0].experts_wgrad for count in (2, 16)]
    assert large[0] == pytest.approx(large[1]), "products that take longer than their launches hide these"


def test_latent_experts_take_and_give_fewer_features() -> None:
    whole, latent = (model(top_k=8, ffn=2048, parallel=16, latent=latent) for latent in (None, 256))
    hidden = whole.hidden
    of_whole, of_latent = (layer_costs(each, H100).experts[0] for each in (whole, latent))
    assert of_latent.dispatch == pytest.approx(of_whole.dispatch * 256 / hidden)
    assert of_latent.experts_wgrad < of_whole.experts_wgrad
    own, other = (each.experts_of("experts") for each in (latent, whole))
    assert own is not None and other is not None
    assert own.rank_weights(hidden, True) == pytest.approx(other.rank_weights(hidden, True) * 256 / hidden)
    assert own.other_weights(hidden, True, 1) == other.other_weights(hidden, True, 1) + 2 * 256 * hidden

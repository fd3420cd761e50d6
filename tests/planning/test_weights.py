"""Weights of the layout that a plan has, with a whole or a divided vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement
from megatron.zero_bubble.core.costs.expert_layers import Experts
from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.static import ParameterBytes
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.planning.division import Division
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.vocabulary import variants
from megatron.zero_bubble.planning.weights import ModelWeights

MODEL = Model((3,) * 4, 64, 256, 4, 4, 16, 32, 1, 1000)
ON, UNEVEN = Placement.linear(4), (4, 3, 3, 2)


def figures() -> Figures:
    layer = LayerFigures(1.0, 1.0, 1.0, 4.0, 2.0)
    layers, division = LayerCosts((layer,) * 12, LayerFigures(0.1), layer), Division(12)

    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        return layers.on(division.on(placement))

    weights = ModelWeights(MODEL, division, ParameterBytes(2.0, 4.0, 12.0))
    return Figures(4, 8, on, layers=layers, division=division, weights=weights).evenly()


def test_a_rank_with_more_layers_has_more_weights() -> None:
    costs, ends = figures(), 18.0 * MODEL.vocab_size * MODEL.hidden
    layer = 18.0 * MODEL.layer_weights
    assert costs.weights_on(ON) == pytest.approx((3 * layer + ends, 3 * layer, 3 * layer, 3 * layer + ends))
    laid_out = costs.laid_out(ON, UNEVEN)
    assert laid_out.weights_on(ON) == pytest.approx((4 * layer + ends, 3 * layer, 3 * layer, 2 * layer + ends))
    sizes = laid_out.sizes_on(ON)
    assert sizes is not None and sizes.weights == pytest.approx([own / 9 for own in laid_out.weights_on(ON) or ()])


def test_all_ranks_have_equal_parts_of_a_divided_vocabulary() -> None:
    (variant,) = variants(figures(), Divided(2))
    layer, part = 18.0 * MODEL.layer_weights, 18.0 * 2 * MODEL.vocab_size * MODEL.hidden / 4
    assert variant.costs.weights_on(ON) == pytest.approx((3 * layer + part,) * 4)
    laid_out = variant.costs.laid_out(ON, UNEVEN)
    assert laid_out.weights_on(ON) == pytest.approx([count * layer + part for count in UNEVEN])
    times, memory = laid_out.on(ON)
    assert times.vocabulary is not None and times.forward_ms == (4.0, 3.0, 3.0, 2.0), "neither embedding nor loss"
    assert len(memory.logits) == 4


def test_weights_of_layers_may_have_a_size_of_their_own() -> None:
    """Those in FP8, next to which the embedding and the output layer stay in 16 bits."""
    costs = figures()
    assert isinstance(costs.weights, ModelWeights)
    own = replace(costs, weights=replace(costs.weights, parts=ParameterBytes(2.0, 4.0, 12.0, 4.0)))
    layer, ends = 20.0 * MODEL.layer_weights, 18.0 * MODEL.vocab_size * MODEL.hidden
    assert own.weights_on(ON) == pytest.approx((3 * layer + ends, 3 * layer, 3 * layer, 3 * layer + ends))
    sizes, plain = own.sizes_on(ON), costs.sizes_on(ON)
    assert sizes is not None and plain is not None and sizes.gradients == plain.gradients
    assert sum(sizes.weights) == pytest.approx(sum(plain.weights) + 2.0 * 12 * MODEL.layer_weights)


def test_predictions_have_no_copy_of_a_divided_embedding() -> None:
    """Rows travel to their stage instead, in messages that are twice as large."""
    costs = figures()
    assert isinstance(costs.weights, ModelWeights) and costs.layers is not None
    division = replace(Division(12), predictions=(1,))
    layers = replace(costs.layers, layers=(*costs.layers.layers, costs.layers.layers[0]), predictions=1)
    weights = replace(costs.weights, division=division, predictions=("",))
    whole = replace(costs, layers=layers, division=division, weights=weights)
    (variant,) = variants(whole, Divided(2))
    undivided, divided = whole.weights_on(ON), variant.costs.weights_on(ON)
    assert undivided is not None and divided is not None
    copy = 18.0 * MODEL.vocab_size * MODEL.hidden
    assert sum(undivided) - sum(divided) == pytest.approx(copy)
    assert (whole.widths_on(ON), variant.costs.widths_on(ON)) == ((), (2.0, 2.0, 2.0, 1.0))


def test_experts_are_those_of_every_stage_with_replicas_of_their_own() -> None:
    """Two of the ranks that have one copy of the experts are tensor-parallel ranks of one replica."""
    experts = Experts(8, 2, 32, parallel=4, tensor_parallel=2)
    model = replace(MODEL, experts=experts, tensor_parallel=2)
    sizes = ModelWeights(model, Division(12), ParameterBytes(2.0, 4.0, 12.0)).of_stages(ON)
    assert sizes.experts is not None and sizes.per_copy == 4.0
    each = experts.rank_weights(model.hidden, model.gated)
    assert sizes.experts.weights == pytest.approx((2 * 3 * each,) * 4)
    assert sizes.experts.optimizer == pytest.approx((12 * 3 * each,) * 4)
    assert all(whole > own for whole, own in zip(sizes.gradients, sizes.experts.gradients, strict=True))

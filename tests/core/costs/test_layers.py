"""Costs per layer: layouts, and parts derived from stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import estimate, layer_costs
from megatron.zero_bubble.core.costs.expert_layers import Experts
from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures, of_stages
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.errors import UserError

LAYER, WIDE = LayerFigures(2.0, 3.0, 1.0, 10.0, 6.0, 2.0, 0.5, 0.25), LayerFigures(4.0, 5.0, 2.0, 20.0, 7.0)
ENDS = LayerFigures(0.5, 0.0, 0.25, 1.0), LayerFigures(6.0, 7.0, 8.0, 3.0, 2.0)
SHAPES = Model((3, 3), 2048, 8192, 16, 8, 128, 4096, 2, 128_000, gated=True, tensor_parallel=2)


def test_stages_have_the_parts_that_are_on_them() -> None:
    layers = LayerCosts((LAYER, WIDE, LAYER), *ENDS, 0.3, {(0, 1): 0.7})
    costs, memory = layers.on((1, 2, 0))
    assert costs.forward_ms == (2.5, 6.0, 6.0) and costs.backward_ms == (3.0, 8.0, 7.0)
    assert costs.wgrad_ms == (1.25, 3.0, 8.0) and (costs.comm_ms, costs.links) == (0.3, {(0, 1): 0.7})
    assert memory.activation == (11.0, 30.0, 3.0) and memory.wgrad == (6.0, 13.0, 2.0)
    assert memory.history == (2.0, 2.0, 0.0)
    assert costs.forward_attention == (1.0 / 2.5, 1.0 / 6.0, 0.0)
    assert costs.backward_attention == (0.75 / 3.0, 0.75 / 8.0, 0.0)
    assert layers.rank_work_ms(Placement.vee(1), (1, 2)) == (6.75 + 17.0 + 21.0,)
    assert layers.rank_work_ms(Placement.linear(2), (1, 2)) == (6.75, 38.0)


def test_a_stage_that_keeps_nothing_known_keeps_its_input() -> None:
    assert LayerCosts((LAYER,)).on((0, 1))[1].activation == (0.01, 10.0)
    assert LayerCosts((LAYER,), input_memory=4.0).on((0, 1))[1].activation == (4.0, 10.0)


@pytest.mark.parametrize("layout", [(1, 1), (3, -1)])
def test_layouts_of_other_layers_are_rejected(layout: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="the layers per stage must add up to 3; got"):
        LayerCosts((LAYER,) * 3).on(layout)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("placement", [Placement.linear(3), Placement.vee(3)])
def test_estimates_per_layer_equal_estimates_per_stage(recompute: str, placement: Placement) -> None:
    counts = (3, 2, 1) if placement.num_stages == 3 else (1, 1, 2, 2, 2, 1)
    model = replace(SHAPES, layers=counts, recompute=recompute)
    costs, memory = layer_costs(model, DEVICES["h100"]).on(counts)
    expected, kept = estimate(model, DEVICES["h100"], placement)
    for name in ("forward_ms", "backward_ms", "wgrad_ms", "forward_attention", "backward_attention"):
        assert getattr(costs, name) == pytest.approx(getattr(expected, name), rel=1e-9), name
    for name in ("activation", "wgrad", "history"):
        assert getattr(memory, name) == pytest.approx(getattr(kept, name), rel=1e-9), name
    assert (costs.comm_ms, memory.recomputed) == (expected.comm_ms, kept.recomputed)


@pytest.mark.parametrize("kinds", ["dense", "experts"])
@pytest.mark.parametrize("again", range(4))
def test_layers_that_are_not_computed_again_are_as_without_recomputation(again: int, kinds: str) -> None:
    experts = None if kinds == "dense" else Experts(8, 2, 1024, 0, 4)
    whole, kept = (
        layer_costs(replace(SHAPES, experts=experts, recompute=how), DEVICES["h100"]) for how in ("full", "none")
    )
    model = replace(SHAPES, experts=experts, recompute="full", again=again)
    found = layer_costs(model, DEVICES["h100"]).on((3, 3))
    mixed = whole.layers[:again] + kept.layers[again:3]
    parts = whole.experts[:again] + kept.experts[again:3]
    expected = replace(whole, layers=mixed * 2, experts=parts * 2).on((3, 3))
    for own, wanted in zip(found, expected, strict=True):
        for name, value in vars(wanted).items():
            if isinstance(value, tuple) and name != "experts":
                assert getattr(own, name) == pytest.approx(value, rel=1e-9), name
    sent = ([part.all_to_all for part in costs.experts] for costs in (found[0], expected[0]))
    assert next(sent) == pytest.approx(next(sent))


def test_parts_are_derived_from_stages() -> None:
    """The inner stages give a layer, and the ends what they take beyond their layers."""
    layers = LayerCosts((LAYER,) * 7, *ENDS, 0.3)
    found = of_stages(*layers.on((1, 3, 2, 1)), (1, 3, 2, 1))
    for part, expected in zip((found.layers[0], found.embedding, found.loss), (LAYER, *ENDS), strict=True):
        for name, value in vars(expected).items():
            assert getattr(part, name) == pytest.approx(value, abs=1e-9), name
    assert found.num_layers == 7 and found.comm_ms == 0.3
    shorter = of_stages(layers.on((3, 2, 2))[0], None, (3, 2, 2))
    assert shorter.layers[0].activation == 1.0 and shorter.layers[0].forward_ms == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("layout", "message"),
    [((1, 5, 1), "one number for each of the 4 stages"), ((3, 0, 0, 4), "to a stage between the first and the last")],
)
def test_unsuitable_layers_per_stage_are_rejected(layout: tuple[int, ...], message: str) -> None:
    costs, memory = LayerCosts((LAYER,) * 7).on((1, 3, 2, 1))
    with pytest.raises(UserError, match=message):
        of_stages(costs, memory, layout)


def test_figures_are_checked() -> None:
    with pytest.raises(UserError, match="forward_ms must be a finite number, 0 or above; got -1"):
        LayerFigures(-1.0)
    with pytest.raises(UserError, match="forward_attention is a share"):
        LayerFigures(1.0, forward_attention=1.5)


def test_a_recorded_layout_has_its_recorded_figures() -> None:
    """So a plan for these stages is the same with layers and without."""
    times = ((1.0, 6.1, 3.9, 9.0), (2.0, 6.0, 4.1, 9.5), (0.4, 3.0, 2.0, 1.1))
    costs = PassCosts(*times, host_ms=(0.5, 1.5, 1.0, 0.6), gather_ms=(0.1, 0.3, 0.2, 0.1))
    costs = costs.with_attention((0.1, 0.5, 0.4, 0.05))
    memory = PassMemory((20.0, 31.0, 19.0, 25.0), (6.0, 18.0, 12.0, 9.0), (1.0, 6.0, 4.0, 2.0))
    again, kept = of_stages(costs, memory, (1, 3, 2, 1)).on((1, 3, 2, 1))
    for name in ("forward_ms", "backward_ms", "wgrad_ms", "host_ms", "gather_ms", "forward_attention"):
        assert getattr(again, name) == pytest.approx(getattr(costs, name)), name
    for name in ("activation", "wgrad", "history"):
        assert getattr(kept, name) == pytest.approx(getattr(memory, name)), name
    finer, _ = of_stages(costs, memory, (1, 3, 2, 1)).on((1, 1, 1, 1, 1, 1, 0, 1))
    assert finer.forward_ms == pytest.approx((1.0, 6.1 / 3, 6.1 / 3, 6.1 / 3, 3.9 / 2, 3.9 / 2, 0.0, 9.0))


def test_two_stages_are_assumed_to_have_no_embedding_to_compute() -> None:
    """They do not tell it from layers; what the last takes beyond its layers is the output layer's."""
    layers = of_stages(LayerCosts((LAYER,) * 5, loss=ENDS[1]).on((3, 2))[0], None, (3, 2))
    assert (layers.embedding.work_ms, layers.loss.work_ms) == pytest.approx((0.0, ENDS[1].work_ms))
    assert layers.layers[0].work_ms == pytest.approx(LAYER.work_ms)


SLOW = LayerFigures(6.0, 9.0, 3.0, 20.0, 5.0, 1.0, 0.5, 0.5)


@pytest.mark.parametrize("pattern", ["M|MM*|M**|*", "MM|M*M|MMM|*", "|M*|MM*|M"])
def test_layers_of_a_hybrid_model_are_derived_by_letter(pattern: str) -> None:
    stages = pattern.split("|")
    kinds, layout = "".join(stages), tuple(map(len, stages))
    whole = LayerCosts(tuple({"M": LAYER, "*": SLOW}[kind] for kind in kinds), *ENDS, 0.3)
    costs, memory = whole.on(layout)
    found = of_stages(costs, memory, layout, kinds=kinds)
    for part, expected in zip(
        (*found.layers, found.embedding, found.loss), (*whole.layers, whole.embedding, whole.loss), strict=True
    ):
        for name, value in vars(expected).items():
            assert getattr(part, name) == pytest.approx(value, rel=1e-4, abs=1e-4), name
    again, kept = found.on(layout)
    assert again.forward_ms == pytest.approx(costs.forward_ms) and kept.activation == pytest.approx(memory.activation)


def test_letters_that_no_stage_tells_apart_take_equally_long() -> None:
    costs, memory = LayerCosts((LAYER, SLOW) * 4, *ENDS).on((2, 2, 2, 2))
    found = of_stages(costs, memory, (2, 2, 2, 2), kinds="M*" * 4)
    mean = (LAYER.forward_ms + SLOW.forward_ms) / 2
    assert [layer.forward_ms for layer in found.layers[2:4]] == pytest.approx([mean, mean])

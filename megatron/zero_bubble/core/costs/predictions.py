"""Estimates for multi-token prediction: a projection and a transformer layer, and the output layer once more.

Each of its layers concatenates the hidden states with the embedding of the next token and projects them back to the
hidden size. Megatron runs them together on one of the last stages, with a copy of the embedding, and computes their
logits and losses on the last stage (DeepSeek-V3, arXiv 2412.19437, section 2.2;
``megatron.core.transformer.multi_token_prediction``). In a hybrid model, they are on the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.zero_bubble.core.costs.devices import Device
from megatron.zero_bubble.core.costs.estimate import layer_costs
from megatron.zero_bubble.core.costs.experts import NO_EXPERTS, ExpertParts
from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures
from megatron.zero_bubble.core.costs.model import Model

ASSUMED = "A layer of multi-token prediction (mtp) counts as a layer, a projection and an output layer."
"""What estimates assume, as a sentence."""


class PredictionParts(NamedTuple):
    """One layer of multi-token prediction; ms and bytes.

    Attributes:
        layer: with its projection.
        head: its output layer.
        experts: the all-to-alls and the experts of the layer, which ``layer`` includes.
    """

    layer: LayerFigures
    head: LayerFigures
    experts: ExpertParts = NO_EXPERTS

    @property
    def work_ms(self) -> float:
        """What it computes for a microbatch."""
        return self.layer.work_ms + self.head.work_ms


def prediction_parts(model: Model, device: Device, letters: str = "") -> PredictionParts:
    """Estimate one layer of multi-token prediction.

    Args:
        letters: its layers in a hybrid model; empty for a layer like the model's last one.
    """
    parts = layer_costs(_inside(model, letters), device)
    layer, states = parts.layers[0].plus(*parts.layers[1:]), model.state_bytes
    dense = layer_costs(replace(model, layers=(1,), experts=None, pattern="", adapters=None, frozen=0), device).layers[
        0
    ]
    # W of a dense layer has no other operations than those of its matrices.
    projection_ms = dense.wgrad_ms * 2 * model.hidden**2 / model.layer_weights
    # The projection's input is twice as wide as the hidden states; its W takes that and the gradient of its output.
    trained = model.adapters is None
    times = projection_ms, projection_ms, projection_ms * trained
    projection = LayerFigures(*times, activation=2 * states, wgrad=3 * states * trained)
    experts = ExpertParts._make(map(sum, zip(NO_EXPERTS, *parts.experts, strict=True)))
    return PredictionParts(layer.plus(projection), parts.loss, experts)


def with_predictions(costs: LayerCosts, model: Model, device: Device, predictions: Sequence[str]) -> LayerCosts:
    """Add layers of multi-token prediction: as one more part, whose output layers are on the last stage, or in a hybrid
    model all on the last stage.

    Args:
        predictions: the ``letters`` of each.
    """
    parts = [prediction_parts(model, device, letters) for letters in predictions]
    if not parts:
        return costs
    heads = costs.loss.plus(*(part.head for part in parts))
    together = parts[0].layer.plus(*(part.layer for part in parts[1:]))
    if model.pattern:
        return replace(costs, loss=heads.plus(together))
    own = ExpertParts._make(map(sum, zip(*(part.experts for part in parts), strict=True)))
    return replace(
        costs,
        layers=(*costs.layers, together),
        loss=heads,
        experts=(*costs.experts, own) if costs.experts else (),
        predictions=len(parts),
    )


def _inside(model: Model, letters: str) -> Model:
    """The model with only what is in a layer of multi-token prediction."""
    if letters:
        return replace(model, layers=(len(letters),), pattern=letters, frozen=0)
    experts = model.experts
    has = experts is not None and (not experts.layers or experts.layers[-1])
    own = replace(experts, layers=()) if experts is not None and has else None
    return replace(model, layers=(1,), pattern="", experts=own, frozen=0)


def prediction_weights(model: Model, predictions: Sequence[str], has_copy: bool) -> float:
    """Number of weights (the part of one tensor-parallel rank) that layers of multi-token prediction add to a stage:
    projections, layers, and a copy of the embedding, which the first stage does not need.
    """
    if not predictions:
        return 0.0
    split = model.tensor_parallel
    inside = [_inside(model, letters) for letters in predictions]
    layers = sum(each.weights_of(kind) for each in inside for kind in each.kinds)
    projections = len(predictions) * 2 * model.hidden**2 / split
    return layers + projections + (model.vocab_size * model.hidden / split if has_copy else 0.0)


def trained_prediction_weights(model: Model, predictions: Sequence[str]) -> tuple[float, float]:
    """Number of these weights that are trained, where not all of a model is, and those of experts among them."""
    inside = [(each, kind) for each in (_inside(model, letters) for letters in predictions) for kind in each.kinds]
    trained = sum(each.trained_of(kind) for each, kind in inside)
    if model.adapters is None:
        trained += len(predictions) * 2 * model.hidden**2 / model.tensor_parallel
    return trained, sum(each.trained_experts_of(kind) for each, kind in inside)


def prediction_expert_weights(model: Model, predictions: Sequence[str]) -> float:
    """Number of these weights that are of experts, as ``Model.expert_weights``."""
    inside = (_inside(model, letters) for letters in predictions)
    return sum(each.expert_weights_of(kind) for each in inside for kind in each.kinds)

"""Estimates for multi-token prediction: a projection and a transformer layer, and the output layer once more.

Each of its layers concatenates the hidden states with the embedding of the next token and projects them back to the
hidden size. Megatron runs it on any of the last stages, with a copy of the embedding, and computes its logits and loss
on the last stage (DeepSeek-V3, arXiv 2412.19437, section 2.2; ``megatron.core.transformer.multi_token_prediction``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.devices import Device
from megatron.zero_bubble.core.costs.estimate import layer_costs
from megatron.zero_bubble.core.costs.experts import NO_EXPERTS, ExpertParts
from megatron.zero_bubble.core.costs.layers import LayerFigures
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.terms import OF_LAYER, TIMES


class PredictionParts(NamedTuple):
    """One layer of multi-token prediction; ms and bytes.

    Attributes:
        layer: with its projection.
        head: its output layer.
        experts: the all-to-alls and the experts of the layer, which ``layer`` includes; None if it has none.
    """

    layer: LayerFigures
    head: LayerFigures
    experts: ExpertParts | None = None

    @property
    def work_ms(self) -> float:
        """What it computes for a microbatch."""
        return self.layer.work_ms + self.head.work_ms


def prediction_parts(model: Model, device: Device) -> PredictionParts:
    """Estimate one layer of multi-token prediction."""
    parts = layer_costs(_last_layer(model), device)
    layer, states = parts.layers[0], model.message_bytes
    dense = layer_costs(replace(model, layers=(1,), experts=None), device).layers[0]
    # W of a dense layer has no other operations than those of its matrices.
    projection_ms = dense.wgrad_ms * 2 * model.hidden**2 / model.layer_weights
    times = {name: getattr(layer, name) + projection_ms for name in TIMES}
    shares = {
        f"{name}_attention": getattr(layer, f"{name}_attention") * getattr(layer, f"{name}_ms") / times[f"{name}_ms"]
        for name in ("forward", "backward")
    }
    # The projection's input is twice as wide as the hidden states; its W takes that and the gradient of its output.
    kept = {"activation": layer.activation + 2 * states, "wgrad": layer.wgrad + 3 * states}
    experts = parts.experts[0] if parts.experts else None
    return PredictionParts(replace(layer, **times, **shares, **kept), parts.loss, experts)


def _last_layer(model: Model) -> Model:
    """The model with only its last layer, which those of multi-token prediction are like."""
    experts = model.experts
    has = experts is not None and (not experts.layers or experts.layers[-1])
    own = replace(experts, layers=()) if experts is not None and has else None
    return replace(model, layers=(1,), pattern="", experts=own)


def prediction_weights(model: Model, counts: Sequence[int]) -> tuple[float, ...]:
    """Number of weights per stage (the part of one tensor-parallel rank) that ``counts`` layers of multi-token
    prediction add: projections, layers and a copy of the embedding on a stage that does not have it.
    """
    split, last = model.tensor_parallel, _last_layer(model)
    each = last.weights_of(last.kinds[0]) + 2 * model.hidden**2 / split
    copies = [model.vocab_size * model.hidden / split if count and stage else 0 for stage, count in enumerate(counts)]
    return tuple(count * each + copy for count, copy in zip(counts, copies, strict=True))


def prediction_expert_weights(model: Model, counts: Sequence[int]) -> tuple[float, ...]:
    """Number of these weights that are of experts, as ``Model.expert_weights``."""
    last = _last_layer(model)
    return tuple(count * last.expert_weights_of(last.kinds[0]) for count in counts)


def with_predictions(
    costs: PassCosts, memory: PassMemory, counts: Sequence[int], parts: PredictionParts
) -> tuple[PassCosts, PassMemory]:
    """Add ``counts`` layers of multi-token prediction per stage, and as many output layers on the last stage."""
    layer, head, experts = parts
    last = len(counts) - 1
    added = [(count, sum(counts) if stage == last else 0) for stage, count in enumerate(counts)]

    def plus(amounts: tuple[float, ...], name: str) -> tuple[float, ...]:
        of_layer, of_head = getattr(layer, name), getattr(head, name)
        return tuple(own + n * of_layer + m * of_head for own, (n, m) in zip(amounts, added, strict=True))

    forward, backward, wgrad = (plus(getattr(costs, name), name) for name in TIMES)
    shares = []
    for name, times in (("forward", forward), ("backward", backward)):
        own, of_layer = getattr(costs, f"{name}_ms"), getattr(layer, f"{name}_ms") * getattr(layer, f"{name}_attention")
        scores = zip(getattr(costs, f"{name}_attention"), own, counts, times, strict=True)
        shares.append(tuple(min(1.0, (a * ms + n * of_layer) / new) if new else 0.0 for a, ms, n, new in scores))
    own_costs = replace(costs, forward_ms=forward, backward_ms=backward, wgrad_ms=wgrad).with_attention(*shares)
    if costs.experts:
        plain = experts or NO_EXPERTS
        stages = tuple(own.plus(plain, count) for own, count in zip(costs.experts, counts, strict=True))
        own_costs = own_costs.with_experts(stages, costs.contention)
    names = (term.field for term in OF_LAYER if term.owner == "memory")
    sums: dict[str, Any] = {name: plus(getattr(memory, name), name) for name in names}
    return own_costs, replace(memory, **sums)

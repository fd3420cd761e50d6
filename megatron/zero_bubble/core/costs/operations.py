"""The floating-point operations of a model, as logs of training count them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.transformer import output_layer, work_of


def operations(model: Model, predictions: Sequence[str] = ()) -> float:
    """Return them per token: three times those of F, of attention only what a causal mask leaves, and nothing twice.
    Frozen linear layers have no W, and layers below all that is trained only F.

    Args:
        predictions: the letters of each layer of multi-token prediction; empty ones are like the last layer.
    """
    once, passes = replace(model, flash=True, recompute="none"), 3.0 if model.adapters is None else 2.0
    head, projection = output_layer(model).forward, 4.0 * model.tokens * model.hidden**2

    def trained(kind: str) -> float:
        work = work_of(kind, once)
        return 3.0 * work.forward - work.frozen

    layers = [
        work_of(kind, once).forward if is_below else trained(kind)
        for is_below, kind in zip(model.untrained, model.kinds, strict=True)
    ]
    inside = [trained(kind) for letters in predictions for kind in letters or model.kinds[-1:]]
    others = head + len(predictions) * (projection + head)
    return (sum(layers) + sum(inside) + passes * others) / model.tokens

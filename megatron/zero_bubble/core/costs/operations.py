"""The floating-point operations of a model, as logs of training count them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.transformer import output_layer, work_of


def operations(model: Model, predictions: Sequence[str] = ()) -> float:
    """Return them per token: three times those of F, of attention only what a causal mask leaves, and nothing twice.

    Args:
        predictions: the letters of each layer of multi-token prediction; empty ones are like the last layer.
    """
    once, head = replace(model, flash=True, recompute="none"), output_layer(model).forward
    layers = [work_of(kind, once).forward for kind in model.kinds]
    inside = sum(work_of(kind, once).forward for letters in predictions for kind in letters or model.kinds[-1:])
    each = 4.0 * model.tokens * model.hidden**2 + head
    return 3.0 * (sum(layers) + head + inside + len(predictions) * each) / model.tokens

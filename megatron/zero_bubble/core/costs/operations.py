"""The floating-point operations of a model, as logs of training count them."""

from __future__ import annotations

from dataclasses import replace

from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.transformer import output_layer, work_of


def operations(model: Model, predictions: int = 0) -> float:
    """Return them per token: three times those of F, of attention only what a causal mask leaves, and nothing twice.

    Args:
        predictions: the layers of multi-token prediction.
    """
    once, head = replace(model, flash=True, recompute="none"), output_layer(model).forward
    layers = [work_of(kind, once).forward for kind in model.kinds]
    predicted = layers[-1] + 4.0 * model.tokens * model.hidden**2 + head
    return 3.0 * (sum(layers) + head + predictions * predicted) / model.tokens

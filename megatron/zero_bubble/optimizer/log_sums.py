"""What forwards add to outside their results, for the log."""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils

_SUMS = (
    ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper"),
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper"),
)
"""Classes that sum up losses of a forward for the log, and their modules; without the module nothing is summed up."""


def sums_for_the_log() -> dict[tuple[str, str], torch.Tensor]:
    """What forwards add to beside their results, by owner and name: auxiliary losses of experts, losses and hits of
    multi-token prediction, losses of sparse attention. The tensors themselves.
    """
    sums = {("experts", name): values for name, values in _sums_of_experts().items()}
    for module, owner in _SUMS:
        helper = getattr(sys.modules.get(module), owner, None)
        tracker = {} if helper is None else helper.tracker  # holds process groups, too
        sums |= {(owner, name): value for name, value in tracker.items() if isinstance(value, torch.Tensor)}
    return sums


def _sums_of_experts() -> dict[str, torch.Tensor]:
    """From 0.18 on in a module of their own; what ``moe_utils`` then returns is a copy."""
    logging: Any = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if logging is not None:
        return {name: entry.values for name, entry in logging.get_moe_metrics_tracker().metrics.items()}
    return {name: entry["values"] for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()}

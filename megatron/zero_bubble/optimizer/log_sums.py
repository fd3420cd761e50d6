"""Access to the running sums that forwards update for the log, such as auxiliary losses."""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils

_SUMS = (
    ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper"),
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper"),
)
"""Modules and classes that sum up losses for the log; skipped if the module is not imported."""


def sums_for_the_log() -> dict[tuple[str, str], torch.Tensor]:
    """The tensors that forwards add to for the log, by owner and name; not copies.

    They are auxiliary losses of experts, losses and hits of multi-token prediction, and losses of sparse attention.
    """
    sums = {("experts", name): values for name, values in _sums_of_experts().items()}
    for module, owner in _SUMS:
        helper = getattr(sys.modules.get(module), owner, None)
        tracker = {} if helper is None else helper.tracker  # has process groups as values, too
        sums |= {(owner, name): value for name, value in tracker.items() if isinstance(value, torch.Tensor)}
    return sums


def _sums_of_experts() -> dict[str, torch.Tensor]:
    """The sums of experts. Since 0.18 they are in the module ``moe_logging``, and ``moe_utils`` returns a copy."""
    logging: Any = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if logging is not None:
        return {name: entry.values for name, entry in logging.get_moe_metrics_tracker().metrics.items()}
    return {name: entry["values"] for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()}

"""Access to the running sums that forwards update for the log, such as auxiliary losses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils

_PREDICTIONS = "MTPLossLoggingHelper"
_SUMS = (
    ("megatron.core.transformer.multi_token_prediction", _PREDICTIONS),
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper"),
)
"""Modules and classes that sum up losses for the log; skipped if the module is not imported."""


def sums_for_the_log() -> dict[tuple[str, str], torch.Tensor]:
    """The tensors that forwards add to for the log, by owner and name; not copies.

    They are auxiliary losses of experts, losses and hits of multi-token prediction, losses of sparse attention, and
    lengths of packed sequences in a Megatron-LM job.
    """
    sums = {("experts", name): values for name, values in _sums_of_experts().items()}
    lengths = getattr(sys.modules.get("megatron.training.training"), "_seqlen_stats_in_iteration", None)
    if lengths is not None:
        sums["packed sequences", "lengths"] = lengths
    for owner, tracker in _trackers().items():
        sums |= {(owner, name): value for name, value in tracker.items() if isinstance(value, torch.Tensor)}
    return sums


@contextmanager
def counted_in_part(share: float) -> Iterator[None]:
    """Context in which only ``share`` of what is added to the auxiliary losses of experts counts.

    The auxiliary loss of a slice is a mean over its own tokens.
    """
    before = {name: values.clone() for name, values in _sums_of_experts().items()}
    yield
    for name, values in _sums_of_experts().items():
        if name in before:
            values.copy_(torch.lerp(before[name], values, share))
        else:
            values.mul_(share)


class LogSums:
    """The sums of one iteration, kept while the forwards of the next one add to the same tensors."""

    def __init__(self, sums: dict[tuple[str, str], torch.Tensor]) -> None:
        self._sums = sums

    @classmethod
    def taken(cls) -> LogSums:
        """Take the sums so far; the tensors start again at zero."""
        live = sums_for_the_log()
        kept = cls({key: value.clone() for key, value in live.items()})
        for value in live.values():
            value.zero_()
        return kept

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context in which the tensors have these sums, to be logged; afterwards, they have their own again."""
        later = {key: value.clone() for key, value in sums_for_the_log().items()}
        # Logging also drops the process groups of a tracker.
        groups = [
            (tracker, {name: value for name, value in tracker.items() if not isinstance(value, torch.Tensor)})
            for tracker in _trackers().values()
        ]
        _set(self._sums)
        try:
            yield
        finally:
            _set(later)
            for tracker, of in groups:
                tracker.update(of)


def predictions_so_far() -> dict[str, torch.Tensor]:
    """Copies of the sums of multi-token prediction on the rank that computes the loss; empty without such layers."""
    tracker = _trackers().get(_PREDICTIONS, {})
    return {name: value.clone() for name, value in tracker.items() if isinstance(value, torch.Tensor)}


def drop_predictions() -> None:
    """Forget the sums of multi-token prediction on a rank that does not log."""
    _trackers().get(_PREDICTIONS, {}).clear()


def add_predictions(sums: dict[str, torch.Tensor]) -> None:
    """Add the sums of multi-token prediction of another rank to those of this rank, which logs them.

    Megatron takes their mean over the data-parallel group of the rank that logs.
    """
    if not sums:
        return
    tracker = _trackers()[_PREDICTIONS]
    for name, value in sums.items():
        tracker[name] = tracker[name] + value if name in tracker else value
    tracker["avg_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)


def _set(sums: dict[tuple[str, str], torch.Tensor]) -> None:
    for key, value in sums_for_the_log().items():
        if key in sums:
            value.copy_(sums[key])
        else:
            value.zero_()


def _trackers() -> dict[str, dict[str, Any]]:
    """By owner, sums by name; they have process groups as values, too."""
    helpers = {owner: getattr(sys.modules.get(module), owner, None) for module, owner in _SUMS}
    return {owner: helper.tracker for owner, helper in helpers.items() if helper is not None}


def _sums_of_experts() -> dict[str, torch.Tensor]:
    """The sums of experts. Since 0.18 they are in the module ``moe_logging``, and ``moe_utils`` returns a copy."""
    logging: Any = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if logging is not None:
        return {name: entry.values for name, entry in logging.get_moe_metrics_tracker().metrics.items()}
    return {name: entry["values"] for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()}

"""The order of the tokens of all depths of prediction."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron.zero_bubble.integration.adapter.vocabulary.predictions import PredictedLosses


def test_labels_are_in_the_order_of_gathered_hidden_states() -> None:
    """Two tensor-parallel ranks have halves of the sequence, each with all depths, one after the other."""
    gpt = SimpleNamespace(config=SimpleNamespace(mtp_num_layers=2))
    predicted = PredictedLosses(gpt, None, 2)  # type: ignore[arg-type]
    depths = [torch.arange(4).repeat(3, 1) + 10 * depth for depth in range(3)]
    joined = predicted._joined(depths)
    assert joined.tolist() == [[0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]] * 3
    assert all(map(torch.equal, predicted._parted(joined), depths))

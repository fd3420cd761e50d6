"""Rows of the embedding that a stage looks up among those that have arrived."""

from __future__ import annotations

import pytest
import torch

from megatron.zero_bubble.integration.adapter.vocabulary.looked_up import rows_among, with_token_0


def test_tokens_are_found_again_and_their_gradients_added() -> None:
    tokens = with_token_0(torch.tensor([[3, 5, 3], [7, 3, 9]]), 2)
    assert tokens.tolist() == [[3, 5, 3, 0, 0], [7, 3, 9, 0, 0]]
    embedding = torch.randn(10, 4)
    rows = embedding[tokens].requires_grad_()
    shifted = torch.tensor([[5, 3, 0], [3, 9, 0]])
    found = rows_among(rows, tokens)(shifted)
    assert torch.equal(found, embedding[shifted])
    gradient = torch.randn(2, 3, 4)
    found.backward(gradient)
    summed, wanted = torch.zeros(10, 4), torch.zeros(10, 4)
    assert rows.grad is not None
    summed.index_add_(0, tokens.flatten(), rows.grad.flatten(0, 1))
    wanted.index_add_(0, shifted.flatten(), gradient.flatten(0, 1))
    torch.testing.assert_close(summed, wanted)


def test_other_tokens_are_refused() -> None:
    tokens = torch.tensor([[3, 5, 0]])
    with pytest.raises(RuntimeError, match="may look up the tokens of its own sequences"):
        rows_among(torch.zeros(1, 3, 2), tokens)(torch.tensor([[4]]))

"""Tokens of a slice: megatron-core's roll takes in those that follow, and everything else sees the slice alone."""

from __future__ import annotations

import torch

ENDS = (3, 4, 8)


def test_slices_roll_as_the_whole_sequence() -> None:
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    from megatron.zero_bubble.integration.adapter.following import TokensOfSlice

    whole, rolls = torch.arange(1, 17).reshape(2, 8), []
    start = 0
    for end in ENDS:
        expected, tokens = whole, TokensOfSlice.of(whole, (start, end), lambda: rolls.append(1)).clone()
        for _ in range(2):
            expected, number = roll_tensor(expected, shifts=-1, dims=-1)
            tokens, own_number = roll_tensor(tokens, shifts=-1, dims=-1)
            assert own_number == number, "the number of tokens is that of the sequence"
            transposed = tokens.transpose(0, 1)
            assert type(transposed) is torch.Tensor
            assert torch.equal(transposed, expected[:, start:end].transpose(0, 1))
        start = end
    assert torch.equal(whole, torch.arange(1, 17).reshape(2, 8)), "the batch is left as it is"
    assert len(rolls) == 2 * len(ENDS)


def test_other_functions_see_the_slice() -> None:
    from megatron.zero_bubble.integration.adapter.following import TokensOfSlice

    labels = torch.arange(8)[None]
    mask = torch.ones_like(TokensOfSlice.of(labels, (3, 4), lambda: None)).float()
    assert torch.equal(mask * torch.full((1, 1), 2.0), torch.full((1, 1), 2.0))
    tokens = TokensOfSlice.of(labels, (3, 4), lambda: None)
    assert (tokens + 1).sum() == 4 and tokens.shape == (1, 1) and torch.ones_like(tokens).sum() == 8

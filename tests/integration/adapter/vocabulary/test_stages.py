"""What the first stage of a divided vocabulary takes from the job's forward step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.integration.adapter.vocabulary.stages import _stop, _Tokens


class Model(torch.nn.Module):
    def forward(self, input_ids: Any, position_ids: Any = None, decoder_input: Any = None) -> None:
        raise AssertionError("I reads the tokens only")


TOKENS, EMBEDDINGS = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(8, 2, 16)


@pytest.mark.parametrize(("args", "kwargs"), [((TOKENS,), {}), ((), {"input_ids": TOKENS, "decoder_input": None})])
def test_tokens_are_those_that_the_model_gets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(_Tokens) as found:
        _stop(Model(), args, kwargs)
    assert found.value.ids is TOKENS


@pytest.mark.parametrize("given", [{"input_ids": TOKENS, "decoder_input": EMBEDDINGS}, {"input_ids": None}])
def test_embeddings_in_place_of_tokens_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="the model must get tokens, .*; got decoder_input in their place; pass"):
        _stop(Model(), (), given)

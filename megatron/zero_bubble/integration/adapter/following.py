"""The tokens of a slice for multi-token prediction, which also reads those that follow the slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_OF_WHOLE = (torch.roll, torch.ones_like, torch.Tensor.clone, torch.Tensor.select, torch.Tensor.sum)
"""Functions that see the whole sequence: those by which megatron-core shifts tokens and counts them."""


class TokensOfSlice(torch.Tensor):
    """The part of a tensor of tokens, (..., tokens), that is in a slice.

    For every depth of prediction, megatron-core rolls tokens, labels and their mask to the left, fills the end with
    zero, and divides the loss by the sum of the mask. With this class, the tokens that follow the slice come in from
    the right, and the sum is that of the whole sequence. All other functions get the part in the slice.

    Attributes:
        whole: the tensor that the slice is a view of.
    """

    whole: torch.Tensor
    _bounds: tuple[int, int]
    _rolled: Callable[[], None]

    @staticmethod
    def of(whole: torch.Tensor, bounds: tuple[int, int], rolled: Callable[[], None]) -> TokensOfSlice:
        """The tokens within ``bounds``; ``rolled`` is called when they, or a copy of them, are rolled."""
        tokens = whole[..., slice(*bounds)].as_subclass(TokensOfSlice)
        tokens.whole, tokens._bounds, tokens._rolled = whole, bounds, rolled
        return tokens

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function not in _OF_WHOLE or not isinstance(args[0], cls):
                return function(*args, **kwargs)
            tokens = args[0]
            result = function(tokens.whole, *args[1:], **kwargs)
            if function is torch.roll:
                tokens._rolled()
            is_whole = result.shape == tokens.whole.shape
            return cls.of(result, tokens._bounds, tokens._rolled) if is_whole else result

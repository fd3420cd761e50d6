"""The losses that balance the load of experts: those of whole sequences, although tokens are routed slice by slice.

For every expert, megatron-core multiplies the number of tokens that it gets by the sum of its probabilities, of all
tokens. Each slice has its own probabilities, but the tokens of all slices count. The F passes count them; the B passes,
which run after the F of all slices, take the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megatron.zero_bubble.integration.adapter.versions import losses_of_router

_OF_SEQUENCES = ("aux_loss", "seq_aux_loss")
"""The losses of a microbatch; another one, ``global_aux_loss``, is that of all tokens so far."""

Loss = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]


class _Part(NamedTuple):
    """What a slice contributes.

    Attributes:
        probabilities: their sum over the tokens of the slice, per expert; one row.
        tokens: how many each expert gets.
        number: of tokens in the slice.
    """

    probabilities: torch.Tensor
    tokens: torch.Tensor
    number: Any


class _At(NamedTuple):
    """The pass that runs.

    Attributes:
        of: stage and microbatch.
        share: of a sequence's tokens in the slice.
    """

    of: tuple[int, int]
    slice: int
    share: float
    is_forward: bool


class Balancing:
    """Computes the losses of routers for slices of sequences, in place of megatron-core's function."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], dict[tuple[int, str], dict[int, _Part]]] = {}
        self._at: _At | None = None
        self._router = 0
        self._kinds: Iterator[str] = iter(())

    def __len__(self) -> int:
        return len(self._parts)

    @contextmanager
    def at(self, of: tuple[int, int], slice_: int, share: float, is_forward: bool) -> Iterator[None]:
        """Context around a forward or a backward of a slice; see ``_At``."""
        self._at = _At(of, slice_, share, is_forward)
        try:
            yield
        finally:
            self._at = None
        if not is_forward and slice_ == 0:
            self._parts.pop(of, None)

    def routes(self, router: int, module: Any) -> None:
        """Called before the forward of a router; the losses that follow are its losses."""
        self._router = router
        self._kinds = iter(losses_of_router(module))

    def clear(self) -> None:
        """Forget everything, for example after an iteration that failed."""
        self._parts.clear()

    def loss(
        self,
        original: Callable[..., torch.Tensor],
        *,
        probs: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        total_num_tokens: Any,
        **more: Any,
    ) -> torch.Tensor:
        """The loss of a slice, in proportion to its tokens; the losses of all slices are then weighted by them.

        Where a backward repeats the forward of the router, it is the loss of the slice by itself: the other slices are
        not routed in that order.
        """

        def loss(probabilities: torch.Tensor, tokens: torch.Tensor, number: Any) -> torch.Tensor:
            return original(probs=probabilities, tokens_per_expert=tokens, total_num_tokens=number, **more)

        at, kind = self._at, next(self._kinds, None)
        if at is None or not at.is_forward or kind not in _OF_SEQUENCES:
            return loss(probs, tokens_per_expert, total_num_tokens)
        parts = self._parts.setdefault(at.of, {}).setdefault((self._router, kind), {})
        parts[at.slice] = _Part(probs.detach().sum(dim=0, keepdim=True), tokens_per_expert, total_num_tokens)
        value: torch.Tensor = _OfSlice.apply(probs, parts, at, loss)
        return value / at.share


class _OfSlice(torch.autograd.Function):
    """Maps the probabilities in a slice to what it adds to the loss of the sequence up to its end."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, parts: dict[int, _Part], at: _At, loss: Loss) -> torch.Tensor:
        ctx.parts, ctx.loss, ctx.shape = parts, loss, probs.shape
        own = parts[at.slice]
        number = own.number / at.share
        if isinstance(own.number, int):
            number = round(number)  # TransformerEngine's fused loss takes no float
        value = loss(own.probabilities, own.tokens, number)
        for earlier in (parts[slice_] for slice_ in range(at.slice)):
            value = value + loss(own.probabilities, earlier.tokens, number)
            value = value + loss(earlier.probabilities, own.tokens, number)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        parts = ctx.parts.values()
        with torch.enable_grad():
            row = next(iter(parts)).probabilities.clone().requires_grad_()
            loss = ctx.loss(row, sum(each.tokens for each in parts), sum(each.number for each in parts))
            (of_row,) = torch.autograd.grad(loss, row)
        return (gradient * of_row).expand(ctx.shape), None, None, None

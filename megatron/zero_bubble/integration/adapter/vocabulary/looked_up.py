"""Rows of the embedding that several stages use: the first one, and that of multi-token prediction.

The layers of a prediction embed the tokens that follow. All of them are tokens of the same sequence, or token 0, with
which megatron-core fills the end. So the sum of all I has their rows already, if token 0 is looked up too. The rows
travel with the hidden states from the first stage to that of the predictions, and their gradient travels back with that
of the hidden states, to J: no stage has a copy of the embedding, and the passes wait for nothing else than without.
With sequence parallelism, the rows are divided along the sequence as hidden states are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.zero_bubble.core.ir import Kind, Pass
from megatron.zero_bubble.engine.runtime.handlers import Stage
from megatron.zero_bubble.integration.adapter.vocabulary.shards import EmbeddingShard
from megatron.zero_bubble.integration.adapter.vocabulary.tensor_parallel import TensorParallel

_BACKWARD = (Kind.B, Kind.BW)
_UNKNOWN = (
    "with vocabulary parallelism, a model may look up the tokens of its own sequences and token 0 only; it looked up "
    "others: train with --zero-bubble-vocabulary-parallel off"
)


def with_token_0(ids: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Tokens (b, s) and, behind every sequence, token 0, as often as leaves ``num_parts`` parts of equal length."""
    return torch.nn.functional.pad(ids, (0, num_parts))


def rows_among(rows: torch.Tensor, tokens: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what looks up any of ``tokens`` in their ``rows``, which have one more dimension."""
    known, places = tokens.flatten().sort(stable=True)
    table = rows.flatten(0, 1)

    def rows_of(ids: torch.Tensor) -> torch.Tensor:
        found = torch.searchsorted(known, ids.contiguous()).clamp_(max=len(known) - 1)
        torch._assert_async((known[found] == ids).all(), _UNKNOWN)
        return torch.nn.functional.embedding(places[found], table)

    return rows_of


class Passing:
    """A stage between the first one and that of the predictions, which passes the rows on, and their gradient."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def run(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        """See ``runtime.handlers.Stage``."""
        if work.kind is not Kind.F and work.kind not in _BACKWARD:
            return self._stage.run(work, inputs)
        (own, *passed), *others = inputs
        output, *more = self._stage.run(work, (own, *others))
        return (output, *passed), *more


class Predicting:
    """The stage of the predictions, if it is not the first one.

    Args:
        embedding: the rank's shard of the embedding, which then returns the rows that have arrived.
        tensor: the tensor-parallel ranks, each of which has a part of the rows.
    """

    def __init__(self, stage: Stage, embedding: EmbeddingShard, tensor: TensorParallel, forward_only: bool) -> None:
        self._stage, self._embedding, self._tensor = stage, embedding, tensor
        self._forward_only = forward_only

    def run(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        """See ``runtime.handlers.Stage``."""
        if work.kind is Kind.F:
            return self._forward(work, inputs)
        return self._backward(work, inputs) if work.kind in _BACKWARD else self._stage.run(work, inputs)

    def _forward(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        ((hidden, rows, tokens),) = inputs
        with torch.no_grad():
            whole = self._tensor.whole_sequence(rows)
        leaf = whole.detach().requires_grad_(not self._forward_only)
        with self._embedding.delivering(rows_among(leaf, tokens.t()), are_sums=True):
            *outputs, last = self._stage.run(work, (hidden,))
        return *outputs, last if self._forward_only else (last, leaf)

    def _backward(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        *received, (saved, leaf) = inputs
        gradient, *operands = self._stage.run(work, (*received, saved))
        of_rows = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return (gradient, self._tensor.part(of_rows)), *operands

"""What S computes and saves for its T: its softmax, or only what the logits are computed from again."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megatron.zero_bubble.core.ir import Pass
from megatron.zero_bubble.core.ir.passes import T
from megatron.zero_bubble.engine.kernels import vocabulary
from megatron.zero_bubble.engine.kernels.vocabulary import LocalSoftmax, ShardRows
from megatron.zero_bubble.integration.adapter.vocabulary.tensor_parallel import TensorParallel

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Saved:
    """What an S saves for its T.

    Attributes:
        hidden: hidden states, (s/t, b, h).
        tensors: what else the ``Logits`` that made it need.
    """

    hidden: Tensor
    tensors: tuple[Tensor, ...]


class SavedForT:
    """Finds what is saved from S to T; the executor owns it, and it disappears when T has run."""

    def __init__(self) -> None:
        self._saved: weakref.WeakValueDictionary[Pass, Saved] = weakref.WeakValueDictionary()

    def add(self, s: Pass, saved: Saved) -> None:
        """Remember what the pass ``s`` has saved, as long as it exists."""
        self._saved[s._replace(kind=T)] = saved

    def tensors(self, t: Pass) -> Iterable[Tensor]:
        """The tensors that are held in memory until the pass ``t``; none for passes other than T."""
        saved = self._saved.get(t)
        return () if saved is None else (saved.hidden, *saved.tensors)

    def __len__(self) -> int:
        return len(self._saved)


class Softmax(NamedTuple):
    """What S makes.

    Attributes:
        statistics: over the rows of all tensor-parallel ranks, (3, s, b).
        gradient: with algorithm 2, what the shard adds to the gradient of the hidden states, (s/t, b, h).
        saved: for T.
    """

    statistics: Tensor
    gradient: tuple[Tensor, ...]
    saved: Saved


class Logits(Protocol):
    """Computes logits and their gradients; shapes as in ``kernels.vocabulary``."""

    def softmax(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, rows: ShardRows, tensor: TensorParallel, prepares: bool
    ) -> Softmax:
        """Run S.

        Args:
            hidden: (s/t, b, h).
            labels: (s, b).
            prepares: whether to compute the parts of the gradient of the hidden states.
        """
        ...

    def gradients(
        self, saved: Saved, x: Tensor, weight: Tensor, rows: ShardRows, whole: Tensor, of_losses: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run T.

        Args:
            x: the hidden states of all tokens, (s, b, h).
            whole: maximum and total of all shards.
            of_losses: gradient of the losses, (s, b).

        Returns:
            for one block of tokens after the other, hidden states (n, b, h) and the gradient of the logits (n, b, v) in
            float32.
        """
        ...


class KeptLogits:
    """``Logits`` that save the softmax, which T overwrites with the gradient: 4 bytes per logit from S to T."""

    def softmax(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, rows: ShardRows, tensor: TensorParallel, prepares: bool
    ) -> Softmax:
        own = vocabulary.local_softmax(tensor.whole_sequence(hidden), weight, labels, rows)
        whole = tensor.combined(own.statistics)
        if whole is not own.statistics:
            probabilities = own.probabilities.mul_(vocabulary.share(own.statistics, whole)[..., None])
            own = own._replace(probabilities=probabilities, statistics=whole)
        parts = vocabulary.hidden_gradient_parts(own, weight) if prepares else ()
        return Softmax(whole, tuple(map(tensor.added, parts)), Saved(hidden, own))

    def gradients(
        self, saved: Saved, x: Tensor, _weight: Tensor, _rows: ShardRows, whole: Tensor, of_losses: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        yield x, vocabulary.logits_gradient(LocalSoftmax(*saved.tensors), whole, of_losses)


class RecomputedLogits:
    """``Logits`` that save hidden states and labels only: T computes logits again, in blocks of tokens, as S does."""

    def softmax(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, rows: ShardRows, tensor: TensorParallel, prepares: bool
    ) -> Softmax:
        x = tensor.whole_sequence(hidden)
        own, *parts = vocabulary.softmax_in_blocks(x, weight, labels, rows, prepares)
        whole = tensor.combined(own)
        if whole is not own and parts:
            parts[0] *= vocabulary.share(own, whole)[..., None]
        return Softmax(whole, tuple(map(tensor.added, parts)), Saved(hidden, (labels,)))

    def gradients(
        self, saved: Saved, x: Tensor, weight: Tensor, rows: ShardRows, whole: Tensor, of_losses: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        (labels,) = saved.tensors
        for block in vocabulary.blocks(x, weight):
            softmax = vocabulary.local_softmax(x[block], weight, labels[block], rows)
            yield x[block], vocabulary.logits_gradient(softmax, whole[:, block], of_losses[block])

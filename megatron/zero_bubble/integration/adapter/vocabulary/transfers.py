"""The collectives of vocabulary parallelism, on the tensors that its passes make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.ir import Kind, Value
from megatron.zero_bubble.core.ir.vocabulary import FACTORS, HIDDEN, ROWS, TOKENS, Algorithm
from megatron.zero_bubble.engine.kernels import vocabulary
from megatron.zero_bubble.engine.runtime.collectives import Transfer
from megatron.zero_bubble.engine.runtime.handler import FORGOTTEN

Tensors = tuple[torch.Tensor, ...]

_ALIGNMENT = 16
"""Bytes at a multiple of which each tensor starts that is sent together with others."""


@dataclass(frozen=True)
class Shapes:
    """The shapes of a microbatch on this rank.

    Attributes:
        hidden: (s/t, b, h), where t is the number of tensor-parallel ranks that divide the sequence.
        num_tokens: s.
        part: which part of the sequence this tensor-parallel rank has, 0 to t-1.
        dtype, device: those of hidden states, embedding rows and their gradients.
    """

    hidden: tuple[int, ...]
    num_tokens: int
    part: int
    dtype: torch.dtype
    device: torch.device

    @property
    def tokens(self) -> tuple[int, int]:
        """Shape of a tensor with one number per token, (s, b)."""
        return self.num_tokens, self.hidden[1]

    def own(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """The part of (s, b) that belongs to the hidden states of this rank."""
        length = self.hidden[0]
        return of_tokens[self.part * length : (self.part + 1) * length]

    def empty_tokens(self) -> torch.Tensor:
        """Token numbers, (b, s)."""
        return torch.empty(self.tokens[::-1], dtype=torch.int64, device=self.device)

    def empty_hidden(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Hidden states, or with another ``dtype`` a part of their gradient, (s/t, b, h)."""
        return torch.empty(self.hidden, dtype=dtype or self.dtype, device=self.device)

    def empty_rows(self) -> torch.Tensor:
        """Rows of the embedding or their gradient, (b, s, h)."""
        return torch.empty((*self.tokens[::-1], self.hidden[-1]), dtype=self.dtype, device=self.device)

    def empty_of_tokens(self, count: int) -> torch.Tensor:
        """(count, s, b) in float32."""
        return torch.empty((count, *self.tokens), dtype=torch.float32, device=self.device)


@dataclass(frozen=True)
class Scaled:
    """The part of a rank, on its way to the sum with algorithm 2.

    Attributes:
        own: what S made: statistics, and the two parts of the gradient of the hidden states.
        gathered: the statistics of all ranks, which arrive with a transfer before that of the sum, (ranks, 3, s, b).
    """

    own: Tensors
    gathered: torch.Tensor


class VocabularyTransfers:
    """The transfers for ``runtime.collectives``.

    If the ranks have stopped, the contents do not matter, but every rank still takes part.

    Args:
        shapes: those at the output layer.
        of_embedding: those at the embedding, of whose tokens there may be more or fewer.
        num_ranks: the ranks of the pipeline.
        prepares_gradient: whether S computes parts of the gradient of the hidden states: algorithm 2, in training.
    """

    def __init__(
        self, shapes: Shapes, of_embedding: Shapes, num_ranks: int, algorithm: Algorithm, trains: bool
    ) -> None:
        self._shapes, self._of_embedding, self._num_ranks = shapes, of_embedding, num_ranks
        self._prepares_gradient = algorithm == 2 and trains

    def spread(self, value: Value, held: Any, root: int) -> Transfer:
        """Send a value from ``root`` to all ranks.

        Args:
            held: on the root, the value; ``FORGOTTEN`` if the ranks have stopped. None elsewhere.
            root: rank in the group.

        Returns:
            a transfer whose result are the tensors of the value, as listed in ``ir.vocabulary``: hidden states
            (s/t, b, h) and labels (b, s); gradient of the losses, maximum and total, (s, b) in float32; tokens (b, s);
            or rows (b, s, h).
        """
        if held is None or held is FORGOTTEN:
            message, tensors = _packed(self._described(value.name))
        else:
            sent = _sent(value.name, held)
            message, tensors = _packed(sent)
            for tensor, source in zip(tensors, sent, strict=True):
                tensor.copy_(source)

        def run(group: dist.ProcessGroup) -> None:
            dist.broadcast(message, group=group, group_src=root)

        def result() -> Tensors:
            return tuple(tensors[0]) if value.name == FACTORS else tensors

        return Transfer(run, (message,), result if held is None else lambda: None)  # the root has the value already

    def gather(self, _kind: Kind, _microbatch: int, part: Any) -> tuple[Transfer, Scaled]:
        """Gather the statistics of all ranks, by which the parts of the gradient of the hidden states are scaled."""
        own = self._parts(Kind.S) if part is FORGOTTEN else part
        transfer, gathered = self._gather(own[0])
        return transfer, Scaled(own, gathered)

    def total(self, kind: Kind, _microbatch: int, part: Any, root: int, is_root: bool) -> Transfer:
        """Add the parts of all ranks on ``root``.

        Args:
            part: what this rank's pass of ``kind`` made, or what ``gather`` returned; ``FORGOTTEN`` if the ranks have
                stopped.
            root: rank in the group.

        Returns:
            a transfer whose result is None except on the root. For S: losses, maximum and total, (s, b) in float32, and
            with algorithm 2 the gradient of the hidden states for losses of gradient 1, in float32. For T: the gradient
            of the hidden states, rounded to their dtype after the sum. For I: the looked-up rows.
        """
        if isinstance(part, Scaled):
            return self._scaled(part, root, is_root)
        own = self._parts(kind) if part is FORGOTTEN else part
        if kind is Kind.S:
            return self._statistics(own[0], is_root)
        (tensor,) = own
        tensor = tensor.contiguous()

        def run(group: dist.ProcessGroup) -> None:
            dist.reduce(tensor, group=group, group_dst=root)

        return Transfer(run, (tensor,), lambda: (tensor.to(self._shapes.dtype),) if is_root else None)

    def _statistics(self, own: torch.Tensor, is_root: bool) -> Transfer:
        transfer, gathered = self._gather(own)
        return replace(transfer, result=lambda: _losses(vocabulary.combined(gathered.unbind())) if is_root else None)

    def _scaled(self, part: Scaled, root: int, is_root: bool) -> Transfer:
        statistics, gradient, of_labels = part.own
        gathered, gradient = part.gathered, gradient.contiguous()

        def run(group: dist.ProcessGroup) -> None:
            whole = vocabulary.combined(gathered.unbind())
            share = self._shapes.own(vocabulary.share(statistics, whole))
            gradient.mul_(share[..., None]).sub_(of_labels)
            dist.reduce(gradient, group=group, group_dst=root)

        def result() -> Tensors | None:
            return (*_losses(vocabulary.combined(gathered.unbind())), gradient) if is_root else None

        return Transfer(run, (statistics, gradient, of_labels, gathered), result)

    def _gather(self, own: torch.Tensor) -> tuple[Transfer, torch.Tensor]:
        own = own.contiguous()
        gathered = own.new_empty((self._num_ranks, *own.shape))

        def run(group: dist.ProcessGroup) -> None:
            dist.all_gather_into_tensor(gathered.flatten(0, 1), own, group=group)  # gloo takes no other shape

        return Transfer(run, (own, gathered)), gathered

    def _described(self, name: str) -> Tensors:
        """Uninitialized tensors like those that are sent for a value of this name."""
        shapes = self._shapes
        if name == HIDDEN:
            return shapes.empty_hidden(), shapes.empty_tokens()
        if name == FACTORS:
            return (shapes.empty_of_tokens(3),)
        if name == TOKENS:
            return (self._of_embedding.empty_tokens(),)
        assert name == ROWS, f"{name} is no value for all ranks"
        return (self._of_embedding.empty_rows(),)

    def _parts(self, kind: Kind) -> Tensors:
        """Uninitialized tensors in place of a part that was not computed."""
        shapes = self._shapes
        if kind is Kind.S:
            gradient = (shapes.empty_hidden(torch.float32), shapes.empty_hidden()) if self._prepares_gradient else ()
            return shapes.empty_of_tokens(3), *gradient
        return (shapes.empty_hidden(torch.float32) if kind is Kind.T else self._of_embedding.empty_rows(),)


def _losses(whole: torch.Tensor) -> Tensors:
    """Losses, maximum and total, from the statistics of all shards."""
    return vocabulary.cross_entropy(whole), whole[vocabulary.MAXIMUM], whole[vocabulary.TOTAL]


def _sent(name: str, held: Tensors) -> Tensors:
    """The tensors of a value, as they are sent."""
    return (torch.stack(held),) if name == FACTORS else held


def _packed(like: Tensors) -> tuple[torch.Tensor, Tensors]:
    """One tensor for a transfer, and parts of it with the shapes and dtypes of ``like``."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in like]
    *starts, end = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    message = torch.empty(end, dtype=torch.uint8, device=like[0].device)
    parts = zip(starts, sizes, like, strict=True)
    return message, tuple(message[at : at + size].view(tensor.dtype).view(tensor.shape) for at, size, tensor in parts)

"""The collectives of vocabulary parallelism, on the tensors that its passes make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.ir import Kind, Value
from megatron.zero_bubble.ir.vocabulary import FACTORS, HIDDEN, ROWS, TOKENS, Algorithm
from megatron.zero_bubble.kernels import vocabulary
from megatron.zero_bubble.runtime.handler import FORGOTTEN

Tensors = tuple[torch.Tensor, ...]


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


class VocabularyTransfers:
    """Runs one collective at a time, for ``runtime.collectives``; every method blocks.

    If the ranks have stopped, the contents do not matter, but every rank still takes part.

    Args:
        prepares_gradient: whether S computes parts of the gradient of the hidden states: algorithm 2, in training.
    """

    def __init__(self, shapes: Shapes, algorithm: Algorithm, trains: bool) -> None:
        self._shapes = shapes
        self._prepares_gradient = algorithm == 2 and trains

    def spread(self, value: Value, held: Any, root: int, group: dist.ProcessGroup) -> Tensors:
        """Send a value from ``root`` to all ranks.

        Args:
            held: on the root, the value; ``FORGOTTEN`` if the ranks have stopped. None elsewhere.
            root: rank in ``group``.

        Returns:
            the tensors of the value, as listed in ``ir.vocabulary``: hidden states (s/t, b, h) and labels (b, s);
            gradient of the losses, maximum and total, (s, b) in float32; tokens (b, s); or rows (b, s, h).
        """
        buffers = self._buffers(value.name) if held is None or held is FORGOTTEN else _sent(value.name, held)
        source = dist.get_global_rank(group, root)
        for buffer in buffers:
            dist.broadcast(buffer, source, group=group)
        return tuple(buffers[0]) if value.name == FACTORS else buffers

    def total(self, kind: Kind, microbatch: int, part: Any, root: int, group: dist.ProcessGroup) -> Tensors | None:
        """Add the parts of all ranks on ``root``.

        Args:
            part: what this rank's pass of ``kind`` made; ``FORGOTTEN`` if the ranks have stopped.
            root: rank in ``group``.

        Returns:
            None except on the root. For S: losses, maximum and total, (s, b) in float32, and with algorithm 2 the
            gradient of the hidden states for losses of gradient 1, in float32. For T: the gradient of the hidden
            states, rounded to their dtype after the sum. For I: the looked-up rows.
        """
        if part is FORGOTTEN:
            part = self._parts(kind)
        if kind is Kind.S:
            return self._statistics(part, root, group)
        (tensor,) = part
        added = self._reduce(tensor, root, group)
        return added and (added[0].to(self._shapes.dtype),)

    def _statistics(self, part: Tensors, root: int, group: dist.ProcessGroup) -> Tensors | None:
        own = part[0]
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own, group=group)
        whole = vocabulary.combined(parts)
        gradient: Tensors | None = ()
        if self._prepares_gradient:
            mean, of_labels = part[1:]
            share = self._shapes.own(vocabulary.share(own, whole))
            gradient = self._reduce(mean * share[..., None] - of_labels, root, group)
        if gradient is None or group.rank() != root:
            return None
        return vocabulary.cross_entropy(whole), whole[vocabulary.MAXIMUM], whole[vocabulary.TOTAL], *gradient

    def _reduce(self, tensor: torch.Tensor, root: int, group: dist.ProcessGroup) -> Tensors | None:
        tensor = tensor.contiguous()
        dist.reduce(tensor, dist.get_global_rank(group, root), group=group)
        return (tensor,) if group.rank() == root else None

    def _buffers(self, name: str) -> Tensors:
        """Uninitialized tensors for a value of this name, as they are sent."""
        shapes = self._shapes
        if name == HIDDEN:
            return shapes.empty_hidden(), shapes.empty_tokens()
        if name == FACTORS:
            return (shapes.empty_of_tokens(3),)
        if name == TOKENS:
            return (shapes.empty_tokens(),)
        assert name == ROWS, f"{name} is no value for all ranks"
        return (shapes.empty_rows(),)

    def _parts(self, kind: Kind) -> Tensors:
        """Uninitialized tensors in place of a part that was not computed."""
        shapes = self._shapes
        if kind is Kind.S:
            gradient = (shapes.empty_hidden(torch.float32), shapes.empty_hidden()) if self._prepares_gradient else ()
            return shapes.empty_of_tokens(3), *gradient
        return (shapes.empty_hidden(torch.float32) if kind is Kind.T else shapes.empty_rows(),)


def _sent(name: str, held: Tensors) -> Tensors:
    """The tensors of a value, as they are sent."""
    return (torch.stack(held),) if name == FACTORS else tuple(tensor.contiguous() for tensor in held)

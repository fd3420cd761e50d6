"""How tensor-parallel ranks share the work of a shard of the vocabulary: each has rows of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from megatron.zero_bubble.engine.kernels import vocabulary


class TensorParallel(NamedTuple):
    """The tensor-parallel ranks of a shard.

    Attributes:
        group: the tensor-parallel ranks.
        divides_sequence: whether hidden states are divided among them along the sequence.
    """

    group: dist.ProcessGroup
    divides_sequence: bool

    def whole_sequence(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states of all tokens, (s, b, h)."""
        return tensor_parallel.gather_from_sequence_parallel_region(hidden) if self.divides_sequence else hidden

    def added(self, hidden: torch.Tensor) -> torch.Tensor:
        """Add what the ranks computed, (s, b, h) -> (s/t, b, h)."""
        if self.divides_sequence:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(hidden)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(hidden)

    def part(self, hidden: torch.Tensor) -> torch.Tensor:
        """The part of (s, b, h) that this rank has of hidden states."""
        return hidden.chunk(self.num_parts)[self.group.rank()].contiguous() if self.divides_sequence else hidden

    @property
    def num_parts(self) -> int:
        """How many parts of a sequence there are."""
        return self.group.size() if self.divides_sequence else 1

    def combined(self, own: torch.Tensor) -> torch.Tensor:
        """The statistics over the rows of all ranks, (3, s, b), from those over the rows of this rank."""
        if self.group.size() == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(parts, own, group=self.group)
        return vocabulary.combined(parts)

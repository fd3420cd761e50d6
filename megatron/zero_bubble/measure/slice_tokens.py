"""Measures how short a slice of a sequence may be before its matrix products use the device less well.

A product of few rows takes longer per row: it does not fill the device, and starting it takes a time of its own. The
planner therefore gives no slice fewer tokens than measured here (``Cuts`` in ``planning/cuts.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

from megatron.zero_bubble.platforms import Platform

_SLACK = 0.1
"""By how much the time per token of a slice may exceed that of the whole sequence."""
_REPETITIONS = 5


def gather_least_tokens(
    platform: Platform, chunks: Iterable[torch.nn.Module], sequence: int, microbatch: int, group: dist.ProcessGroup
) -> int | None:
    """Measure the largest linear of every rank and return the largest of their results. A collective call of ``group``.

    It takes as long as about ten forwards of that linear. It leaves weights and random states as they are. The result
    is None if a rank lacks the memory, so that a run that has ended does not fail.

    Args:
        chunks: model chunks of this rank.
        sequence: tokens of a sequence.
        microbatch: sequences of a microbatch.
    """
    weight = largest_linear(chunks)
    own: int | None = None
    with suppress(torch.OutOfMemoryError):  # the other ranks wait for this one
        own = 1 if weight is None else least_tokens(_Products(platform, weight, sequence, microbatch).ms, sequence)
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, own, group=group)
    return None if None in of_ranks else max(of_ranks)


def least_tokens(ms: Callable[[int], float], sequence: int) -> int:
    """The last of sequence, sequence / 2, sequence / 4, ... whose time per token is at most 10 % above the first one's.

    Args:
        ms: returns the time that a number of tokens takes.
        sequence: tokens of a sequence.
    """
    most = (1 + _SLACK) * ms(sequence) / sequence
    least = sequence
    while least > 1 and ms(least // 2) <= most * (least // 2):
        least //= 2
    return least


def largest_linear(chunks: Iterable[torch.nn.Module]) -> torch.Tensor | None:
    """The weight with the most elements among those that matrix products use; embeddings are looked up instead."""
    modules = (module for chunk in chunks for module in chunk.modules())
    linears = (module for module in modules if not isinstance(module, (torch.nn.Embedding, VocabParallelEmbedding)))
    weights = (weight for module in linears for weight in module.parameters(recurse=False) if weight.dim() == 2)
    return max(weights, key=torch.Tensor.numel, default=None)


class _Products:
    """Times products of a weight's shape, data type and device, (tokens, in) x (out, in) transposed."""

    def __init__(self, platform: Platform, weight: torch.Tensor, sequence: int, microbatch: int) -> None:
        self._platform, self._microbatch = platform, microbatch
        random = torch.Generator(weight.device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=weight.dtype, device=weight.device).normal_(generator=random)

        outputs, inputs = weight.shape
        self._inputs, self._weight = normal(sequence * microbatch, inputs), normal(outputs, inputs)
        self._outputs = torch.empty(sequence * microbatch, outputs, dtype=weight.dtype, device=weight.device)

    @torch.no_grad()
    def ms(self, tokens: int) -> float:
        """The median time for ``tokens`` of every sequence of a microbatch, without the first product of its size."""
        rows = tokens * self._microbatch
        marks = []
        for _ in range(1 + _REPETITIONS):
            torch.mm(self._inputs[:rows], self._weight.t(), out=self._outputs[:rows])
            marks.append(self._platform.mark())
        return median(self._platform.elapsed_ms(*pair) for pair in pairwise(marks))

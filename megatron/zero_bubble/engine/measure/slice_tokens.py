"""Measures what slices of a sequence take besides their tokens' part of the whole.

A product of few rows takes longer per row, because it does not fill the device. The planner therefore gives no slice
fewer tokens than measured here (``Cuts`` in ``planning/cuts.py``). And a pass has a time that does not depend on its
tokens, such as that of queueing its kernels, which every slice takes (``PassCosts.slice_overhead``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from numpy.polynomial.polynomial import polyfit

from megatron.zero_bubble.engine.platforms import Platform

_SLACK = 0.1
"""By how much the time per token of a slice may exceed that of the whole sequence."""
_REPETITIONS = 5
_HALVINGS = 3
"""How often the sequence is halved to measure what does not depend on its length."""


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


def gather_overhead(
    platform: Platform, chunks: Iterable[torch.nn.Module], sequence: int, microbatch: int, group: dist.ProcessGroup
) -> float:
    """Measure a layer of every rank, and return the share of its forward that does not depend on the number of tokens:
    the median of the ranks that have a ``plain_layer``, and the memory for it; 0 if none has. A collective call of
    ``group``.

    It leaves weights and random states as they are.

    Args:
        chunks, sequence, microbatch: as for ``gather_least_tokens``.
    """
    layer, own = plain_layer(chunks), None
    if layer is not None:
        with suppress(torch.OutOfMemoryError):  # the other ranks wait for this one
            own = fixed_share(*_layer_times(platform, layer, sequence, microbatch))
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, own, group=group)
    measured = [share for share in of_ranks if share is not None]
    return float(median(measured)) if measured else 0.0


def plain_layer(chunks: Iterable[torch.nn.Module]) -> TransformerLayer | None:
    """The first layer of attention and an MLP, if it runs by itself: without experts, FP8, CUDA graphs, tensor or
    context parallelism, with all its weights, and without hooks, which may gather them: no other rank takes part, so
    that one without memory for it leaves none waiting. Its input is all that it needs.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if (
            type(module) is TransformerLayer
            and type(module.mlp) is MLP
            and type(module.self_attention) is SelfAttention
        ):
            return module if _runs_by_itself(module, module.config) else None
    return None


def _runs_by_itself(layer: TransformerLayer, config: TransformerConfig) -> bool:
    is_divided = max(config.context_parallel_size, config.tensor_model_parallel_size) > 1
    needs_more = config.fp8 or is_divided or hasattr(layer, "cudagraph_manager")
    has_hooks = any(each._forward_pre_hooks or each._forward_hooks for each in layer.modules())
    is_whole = all(weight.untyped_storage().size() for weight in layer.parameters())
    return is_whole and not needs_more and not has_hooks


def fixed_share(tokens: Sequence[int], times_ms: Sequence[float]) -> float:
    """The share of the longest time that is left at 0 tokens, from 0 to 1.

    By the parabola that has the least relative errors, because attention takes time in proportion to the square of the
    tokens; by a line where there are too few times, or where they do not grow faster than the tokens.
    """
    if len(tokens) < 2 or not all(times_ms):
        return 0.0
    weights = [1 / ms for ms in times_ms]
    for degree in (2, 1) if len(tokens) > 3 else (1,):
        at_nothing, *_, highest = polyfit(tokens, times_ms, degree, w=weights)
        if degree == 1 or highest > 0:
            break
    return min(1.0, max(0.0, float(at_nothing) / max(times_ms)))


@torch.no_grad()
def _layer_times(
    platform: Platform, layer: TransformerLayer, sequence: int, microbatch: int
) -> tuple[list[int], list[float]]:
    """The median times in ms of forwards of half a sequence, a quarter and so on, besides the whole."""
    weight, config = layer.mlp.linear_fc1.weight, layer.config
    tokens = [part for power in range(_HALVINGS + 1) if (part := sequence // 2**power)]
    training = {module: module.training for module in layer.modules()}
    layer.eval()  # dropout would change the random states
    times = []
    try:
        for count in tokens:
            inputs = torch.ones(count, microbatch, config.hidden_size, dtype=weight.dtype, device=weight.device)
            marks = []
            for _ in range(1 + _REPETITIONS):
                layer(inputs, attention_mask=None)
                marks.append(platform.mark())
            times.append(median(platform.elapsed_ms(*pair) for pair in pairwise(marks)))
    finally:
        for module, was_training in training.items():
            module.training = was_training
    return tokens, times


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

"""Stages in Megatron's terms: a pipeline rank and a ``vp_stage``.

Megatron places stage s on pipeline rank s mod P as its chunk s div P, and derives layers, embedding, loss and
checkpoints from these two numbers. A stage that lies elsewhere, on a V for example, is therefore built, run and saved
while Megatron takes it to be on rank s mod P. Every placement whose ranks hold one stage of 0..P-1, one of P..2P-1,
and so on, can be had this way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from megatron.zero_bubble.adapter.versions import models_process_groups
from megatron.zero_bubble.ir import Placement


def is_megatrons_own(placement: Placement) -> bool:
    """Whether every stage lies where Megatron puts it."""
    return all(rank == stage % placement.num_ranks for stage, rank in enumerate(placement.stage_to_rank))


def megatron_rank(placement: Placement, rank: int, chunk: int) -> int:
    """The pipeline rank on which Megatron expects the stage that is chunk number ``chunk`` of ``rank``."""
    return placement.stages_of(rank)[chunk] % placement.num_ranks


@contextlib.contextmanager
def as_pipeline_rank(rank: int) -> Iterator[None]:
    """Within, megatron-core takes this process for pipeline rank ``rank``."""
    before = parallel_state._MPU_PIPELINE_MODEL_PARALLEL_RANK
    parallel_state.set_pipeline_model_parallel_rank(rank)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_rank(before)


def groups_as(rank: int, groups: Any = None) -> Any:
    """Process groups, Megatron's own unless given, for a chunk that takes itself for one of pipeline rank ``rank``."""
    groups = groups or models_process_groups()
    if groups.pp.rank() != rank:
        groups = copy(groups)
        groups.pp = group_as(groups.pp, rank)
    return groups


def group_as(group: Any, rank: int) -> Any:
    """``group`` for what only asks it for this process's rank, which is answered with ``rank``."""
    return _Believing(group, rank)


class _Believing:
    """A process group whose ``rank()`` is another one; everything else is the group's."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank

    def rank(self) -> int:
        return self._rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Believing:
        return self


def embedding_ranks(placement: Placement) -> Any:
    """For ``initialize_model_parallel(get_embedding_ranks=...)``: the ranks of the first and the last stage, which
    share the embedding; one only where a rank holds both.
    """
    first, last = placement.stage_to_rank[0], placement.stage_to_rank[-1]

    def of_pipeline(ranks: list[int]) -> list[int]:
        return sorted({ranks[first], ranks[last]}, key=ranks.index)

    return of_pipeline


def last_stage_of(placement_on: Callable[[int], Placement], original: Callable[..., bool]) -> Callable[..., bool]:
    """``parallel_state.is_pipeline_last_stage`` for a placement on so many ranks.

    Asked about a chunk it knows the true last stage. Asked about a rank it says what it always said, since Megatron's
    loops log on the last rank, where our losses go.
    """

    @functools.wraps(original)
    def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        if ignore_virtual or vp_stage is None:
            return original(ignore_virtual, vp_stage)
        group = parallel_state.get_pipeline_model_parallel_group()
        placement = placement_on(group.size())
        return placement.stages_of(group.rank())[vp_stage] == placement.num_stages - 1

    return is_pipeline_last_stage


def add_tied_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """``finalize_model_grads._allreduce_word_embedding_grads`` where one rank may hold both ends of a tied embedding:
    the same sum, without a message.
    """

    @functools.wraps(original)
    def allreduce_word_embedding_grads(model: Sequence[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
        tied = _tied_weights(model)
        if tied is None:
            original(model, *args, **kwargs)
        else:
            first, last = (weight.main_grad for weight in tied)
            first += last
            last.copy_(first)

    return allreduce_word_embedding_grads


def copy_tied_embedding(model: Sequence[torch.nn.Module]) -> None:
    """Give the output layer the embedding's initial values, where both are on this rank and tied."""
    tied = _tied_weights(model)
    if tied is not None:
        tied[1].data.copy_(tied[0].data)


def _tied_weights(model: Sequence[torch.nn.Module]) -> tuple[Any, Any] | None:
    """The embedding's and the output layer's weight, where this rank holds both, in two chunks, and they are tied."""
    chunks = [get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in model]
    first = next((chunk for chunk in chunks if chunk.pre_process), None)
    last = next((chunk for chunk in chunks if chunk.post_process), None)
    if first is None or last is None or first is last or not first.share_embeddings_and_output_weights:
        return None
    return first.embedding.word_embeddings.weight, last.output_layer.weight

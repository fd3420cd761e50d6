"""Maps stages to Megatron's terms: a pipeline rank and a ``vp_stage``.

Megatron places stage s on pipeline rank s mod P as its chunk s div P, and derives layers, embedding, loss and
checkpoints from these two numbers. A stage on another rank, for example on a V, is therefore built, run and saved while
Megatron sees this process as rank s mod P. This supports every placement in which each rank has one of stages 0..P-1,
one of P..2P-1, and so on.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from megatron.zero_bubble.adapter.versions import models_process_groups
from megatron.zero_bubble.ir import Placement


def megatron_rank(placement: Placement, rank: int, chunk: int) -> int:
    """The pipeline rank where Megatron would put the stage that is chunk ``chunk`` of rank ``rank``."""
    return placement.stages_of(rank)[chunk] % placement.num_ranks


@contextlib.contextmanager
def as_pipeline_rank(rank: int) -> Iterator[None]:
    """Context in which megatron-core sees this process as pipeline rank ``rank``."""
    before = parallel_state._MPU_PIPELINE_MODEL_PARALLEL_RANK
    parallel_state.set_pipeline_model_parallel_rank(rank)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_rank(before)


def groups_as(rank: int, groups: Any = None) -> Any:
    """Process groups that present this process as pipeline rank ``rank``; default: based on Megatron's own groups."""
    groups = groups or models_process_groups()
    if groups.pp.rank() != rank:
        groups = copy(groups)
        groups.pp = group_as(groups.pp, rank)
    return groups


def group_as(group: Any, rank: int) -> Any:
    """``group`` with ``rank()`` replaced by ``rank``; only for callers that do not communicate through it."""
    return _GroupAs(group, rank)


class _GroupAs:
    """Proxy of a process group with another ``rank()``; all other attributes are the group's."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank

    def rank(self) -> int:
        return self._rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __deepcopy__(self, _memo: dict[int, Any]) -> _GroupAs:
        return self


def describe_state_as(chunk: Any, rank_of_chunk: int) -> None:
    """Make a chunk describe its checkpoint state as if on the pipeline rank where Megatron would place the chunk."""
    describe = chunk.sharded_state_dict

    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        with as_pipeline_rank(rank_of_chunk):
            return describe(*args, **kwargs)

    chunk.sharded_state_dict = sharded_state_dict


def segment_of_stage(original: Callable[..., Any]) -> Callable[..., Any]:
    """``select_pipeline_segment``, which gives a hybrid model the layers of its stage, for groups of ``group_as``.

    torch.distributed does not know these. Without a group, upstream counts stages instead of chunks.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def select_pipeline_segment(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        group, chunk = bound.arguments["pp_group"], bound.arguments["vp_stage"]
        if isinstance(group, _GroupAs):
            bound.arguments |= {"pp_group": None, "vp_stage": (chunk or 0) * group.size() + group.rank()}
        return original(*bound.args, **bound.kwargs)

    return select_pipeline_segment


def embedding_ranks(placement: Placement) -> Any:
    """A function for ``initialize_model_parallel(get_embedding_ranks=...)``.

    It returns the ranks of the first and the last stage, which share the embedding, or one rank if it has both.
    """
    first, last = placement.stage_to_rank[0], placement.stage_to_rank[-1]

    def of_pipeline(ranks: list[int]) -> list[int]:
        return sorted({ranks[first], ranks[last]}, key=ranks.index)

    return of_pipeline


def grouping_ends(initialize: Callable[..., None], placement_on: Callable[[int], Placement]) -> Callable[..., None]:
    """``parallel_state.initialize_model_parallel`` with the embedding group of the placement of a number of ranks."""

    @functools.wraps(initialize)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        kwargs["get_embedding_ranks"] = lambda ranks, *_: embedding_ranks(placement_on(len(ranks)))(ranks)
        initialize(*args, **kwargs)

    return initialize_model_parallel


def last_stage_of(placement_on: Callable[[int], Placement], original: Callable[..., bool]) -> Callable[..., bool]:
    """``parallel_state.is_pipeline_last_stage`` for the placement of a number of ranks.

    For a chunk (``vp_stage``), it returns whether the chunk is the last stage of the placement. Without a chunk, it
    returns the result of ``original``: Megatron's loops log on the last rank, which receives our losses.
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
    """Wrap ``finalize_model_grads._allreduce_word_embedding_grads`` for ranks that have both ends of a tied embedding.

    There the gradients are summed locally, with the same result.
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
    """Copy the embedding's initial values to the output layer if this rank has both and they are tied."""
    tied = _tied_weights(model)
    if tied is not None:
        tied[1].data.copy_(tied[0].data)


def is_end(chunk: torch.nn.Module) -> bool:
    """Whether a chunk has the embedding or the output layer."""
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    return bool(model.pre_process or model.post_process)


def _tied_weights(model: Sequence[torch.nn.Module]) -> tuple[Any, Any] | None:
    """The weights of embedding and output layer if they are tied and in two chunks of this rank, else None."""
    chunks = [get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in model]
    first = next((chunk for chunk in chunks if chunk.pre_process), None)
    last = next((chunk for chunk in chunks if chunk.post_process), None)
    if first is None or last is None or first is last or not first.share_embeddings_and_output_weights:
        return None
    return first.embedding.word_embeddings.weight, last.output_layer.weight

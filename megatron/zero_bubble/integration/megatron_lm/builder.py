"""Build the model chunks of a Megatron-LM job on the ranks where a placement has them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.integration.adapter.placement import (
    as_pipeline_rank,
    copy_embedding,
    describe_state_as,
    group_as,
    groups_as,
    megatron_rank,
)
from megatron.zero_bubble.integration.adapter.vocabulary.shards import shard_vocabulary
from megatron.zero_bubble.planning.job.runnable import is_megatrons_own


def built_as_placed(build_iterators: Callable[..., Any], placement: Placement) -> Callable[..., Any]:
    """The replacement for the function that makes the data iterators of one chunk.

    The script asks Megatron whether the chunk reads data, which it also does for multi-token prediction.
    """

    @functools.wraps(build_iterators)
    def build(provider: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        chunk = getattr(provider, "keywords", {}).get("vp_stage")
        if chunk is None:
            return build_iterators(provider, *args, **kwargs)
        with as_pipeline_rank(megatron_rank(placement, parallel_state.get_pipeline_model_parallel_rank(), chunk)):
            return build_iterators(provider, *args, **kwargs)

    return build


class Builder:
    """Build model chunks, each as if on the pipeline rank where Megatron would place it.

    Args:
        divides_vocabulary: whether the vocabulary layers of the chunks are divided over all pipeline ranks.
    """

    def __init__(self, placement: Placement, divides_vocabulary: bool) -> None:
        self._placement = placement
        self._is_megatrons_own = is_megatrons_own(placement)
        self._divides_vocabulary = divides_vocabulary
        self._rank_of_chunk: int | None = None

    def building(self, build_chunks: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement for a function whose first argument builds one chunk."""

        @functools.wraps(build_chunks)
        def build(build_chunk: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            built: list[torch.nn.Module] = []
            if self.divides_ranks:
                _check_takes_stage(build_chunk)

            def build_where_placed(*groups: Any, **of_chunk: Any) -> torch.nn.Module:
                if self._is_megatrons_own:
                    built.append(build_chunk(*groups, **of_chunk))
                else:
                    built.append(self._build(build_chunk, *groups, **of_chunk))
                    copy_embedding(built)
                if self._divides_vocabulary and len(built) == self._num_chunks:
                    shard_vocabulary(built, self._placement)
                return built[-1]

            return build_chunks(build_where_placed, *args, **kwargs)

        return build

    @property
    def divides_ranks(self) -> bool:
        """Whether ranks have several stages."""
        return self._placement.num_stages > self._placement.num_ranks

    @property
    def _num_chunks(self) -> int:
        return len(self._placement.stages_of(parallel_state.get_pipeline_model_parallel_group().rank()))

    def asked_for_group(self, get_group: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement for the function from which a chunk gets its pipeline group."""

        @functools.wraps(get_group)
        def get_pipeline_model_parallel_group(*args: Any, **kwargs: Any) -> Any:
            group = get_group(*args, **kwargs)
            return group if self._rank_of_chunk is None else group_as(group, self._rank_of_chunk)

        return get_pipeline_model_parallel_group

    def _build(self, build_chunk: Callable[..., Any], *groups: Any, vp_stage: int, **kwargs: Any) -> torch.nn.Module:
        """Build one chunk; Megatron passes process groups as the first argument, by keyword, or not at all."""
        rank = parallel_state.get_pipeline_model_parallel_group().rank()
        stage = self._placement.stages_of(rank)[vp_stage]
        rank_of_chunk = megatron_rank(self._placement, rank, vp_stage)
        kwargs["pre_process"] = stage == 0
        kwargs["post_process"] = stage == self._placement.num_stages - 1
        if kwargs.get("pg_collection") is not None:
            kwargs["pg_collection"] = groups_as(rank_of_chunk, kwargs["pg_collection"])
        with as_pipeline_rank(rank_of_chunk):
            self._rank_of_chunk = rank_of_chunk
            try:
                chunk = build_chunk(*(groups_as(rank_of_chunk, g) for g in groups), vp_stage=vp_stage, **kwargs)
            finally:
                self._rank_of_chunk = None
        describe_state_as(chunk, rank_of_chunk)
        return chunk


def _check_takes_stage(build_chunk: Callable[..., Any]) -> None:
    """Reject a script that cannot build one of several chunks of a rank.

    Raises:
        UserError: its function does not take ``vp_stage``.
    """
    parameters = inspect.signature(build_chunk).parameters.values()
    if not any(each.name == "vp_stage" or each.kind is each.VAR_KEYWORD for each in parameters):
        raise UserError(
            "several stages per rank need a script that builds each of them (its model provider takes vp_stage); got "
            f"one with the arguments {', '.join(each.name for each in parameters)}; choose a schedule with one stage "
            "per rank"
        )

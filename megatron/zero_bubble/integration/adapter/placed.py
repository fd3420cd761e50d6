"""Chunks that a framework builds itself, each as if on the pipeline rank where Megatron would place it.

Such a framework asks megatron-core whether a chunk (``vp_stage``) is the first or the last stage and how many layers it
has, and then constructs it. ``placement.last_stage_of`` answers the first question for a placement, this module the
others. Megatron-LM's ``get_model``, which some of them call, asks for the rank alone: ``building`` corrects its answer.
Questions that name a pipeline rank are answered for that rank, and what ``as_pipeline_rank`` surrounds is left alone:
there, our own builders have done the same.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state

from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.engine.runtime.groups import ranks_of
from megatron.zero_bubble.engine.runtime.refusals import refused_together
from megatron.zero_bubble.integration.adapter.model_stages import check_ends, check_predictions
from megatron.zero_bubble.integration.adapter.placement import (
    as_pipeline_rank,
    copy_embedding,
    describe_state_as,
    groups_as,
    is_taken_for_another,
    megatron_rank,
    original_group,
)

_GROUPS = ("pg_collection", "model_comm_pgs")
"""The names of the argument with a module's process groups; megatron-core 0.13 has none."""


class PlacedChunks:
    """Make replacements for what a framework's builder calls.

    Args:
        placement_on: the placement for a number of ranks; None if no placement is in force any more.
    """

    def __init__(self, placement_on: Callable[[int], Placement | None]) -> None:
        self._placement_on = placement_on
        self._model: list[weakref.ref[torch.nn.Module]] = []  # the chunks so far of the model that is being built

    def building(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose first argument builds one chunk, and which takes this rank for the place of its ends."""

        @functools.wraps(original)
        def build(build_chunk: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def build_with_ends(*groups: Any, **of_chunk: Any) -> Any:
                return build_chunk(*groups, **of_chunk | self._ends(of_chunk.get("vp_stage")))

            return original(build_with_ends, *args, **kwargs)

        return build

    def counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that returns the layers of the chunk ``vp_stage``, on this rank unless it is given another."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def of_stage(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            rank = None if given.get("pp_rank") is not None else self._rank_of_chunk(given)
            with nullcontext() if rank is None else as_pipeline_rank(rank):
                return original(*args, **kwargs)

        return of_stage

    def constructing(self, original: Callable[..., None]) -> Callable[..., None]:
        """The ``__init__`` of the layers of a chunk."""
        signature = inspect.signature(original)
        groups = next((name for name in _GROUPS if name in signature.parameters), None)

        @functools.wraps(original)
        def construct(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            rank = self._rank_of_chunk(bound.arguments)
            if rank is None:
                original(*args, **kwargs)
                return
            if groups is not None:
                bound.arguments[groups] = groups_as(rank, bound.arguments.get(groups))
            with as_pipeline_rank(rank):
                original(*bound.args, **bound.kwargs)

        return construct

    def constructing_model(self, original: Callable[..., None]) -> Callable[..., None]:
        """The ``__init__`` of a whole chunk, with its embedding, output layer and checkpoint state."""
        signature, on_rank = inspect.signature(original), self.constructing(original)

        @functools.wraps(original)
        def construct(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            rank = self._rank_of_chunk(given)
            if rank is None:
                original(*args, **kwargs)
                return
            if given["vp_stage"] == 0:
                self._model.clear()
                if given.get("share_embeddings_and_output_weights") or getattr(given["config"], "mtp_num_layers", None):
                    self._check_ends()
            on_rank(*args, **kwargs)
            chunk = given["self"]
            describe_state_as(chunk, rank)
            self._model.append(weakref.ref(chunk))
            chunks = [each for each in (reference() for reference in self._model) if each is not None]
            copy_embedding(chunks)
            group = original_group(parallel_state.get_pipeline_model_parallel_group())
            stages = self._placement(group).stages_of(group.rank())
            if given["vp_stage"] == len(stages) - 1 and len(chunks) == len(stages):
                with refused_together(group):
                    check_predictions(stages, chunks)

        return construct

    def _ends(self, chunk: int | None) -> dict[str, bool]:
        """The arguments with the ends that a chunk of this rank has; none for a chunk that the placement has not."""
        group = original_group(parallel_state.get_pipeline_model_parallel_group())
        placement = None if chunk is None else self._placement_on(group.size())
        stages = () if placement is None else placement.stages_of(group.rank())
        if placement is None or chunk is None or chunk >= len(stages):
            return {}
        return {"pre_process": stages[chunk] == 0, "post_process": stages[chunk] == placement.num_stages - 1}

    def _check_ends(self) -> None:
        """Check that the ranks with the embedding form its group, before the first of them waits for the others."""
        group = original_group(parallel_state.get_pipeline_model_parallel_group())
        with refused_together(group):
            check_ends(self._placement(group), (), ranks_of(group))

    def _placement(self, group: torch.distributed.ProcessGroup) -> Placement:
        placement = self._placement_on(group.size())
        assert placement is not None, "a chunk is built for a placement"
        return placement

    def _rank_of_chunk(self, given: Mapping[str, Any]) -> int | None:
        """The pipeline rank for the arguments of a call; None if they are for no chunk of this pipeline."""
        sizes, chunk = given.get("config", given.get("self")), given.get("vp_stage")
        if chunk is None or sizes.pipeline_model_parallel_size == 1 or is_taken_for_another():
            return None
        group = original_group(parallel_state.get_pipeline_model_parallel_group())
        placement = self._placement_on(group.size()) if group.size() > 1 else None
        if placement is None or chunk >= len(placement.stages_of(group.rank())):
            return None
        return megatron_rank(placement, group.rank(), chunk)

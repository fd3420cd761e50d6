"""The stages of a schedule in a training loop of one's own: what Megatron must know of them, and their model chunks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout import stages_with_embedding
from megatron.zero_bubble.core.formats.layout_string import predictions_of
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.engine.runtime.groups import ranks_of
from megatron.zero_bubble.engine.runtime.refusals import refused_together
from megatron.zero_bubble.integration.adapter.placement import (
    as_pipeline_rank,
    copy_embedding,
    describe_state_as,
    embedding_ranks,
    groups_as,
    megatron_rank,
)
from megatron.zero_bubble.integration.adapter.versions import groups_argument
from megatron.zero_bubble.integration.adapter.vocabulary.shards import shard_vocabulary
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.runnable import is_megatrons_own


class ModelStages:
    """The stages of a schedule on the ranks of a pipeline, for a training loop of one's own on megatron-core.

    For example::

        stages = ModelStages("zb-v", num_ranks=4)
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=4,
            virtual_pipeline_model_parallel_size=stages.virtual_size,
            get_embedding_ranks=stages.embedding_ranks,
        )
        config = TransformerConfig(..., virtual_pipeline_model_parallel_size=stages.virtual_size)
        chunks = stages.build(lambda **stage: GPTModel(config, ..., **stage))

    The same code serves schedules with one stage per rank.

    Attributes:
        virtual_size: Megatron's ``virtual_pipeline_model_parallel_size``: the stages per rank, None for one.
        embedding_ranks: for ``initialize_model_parallel(get_embedding_ranks=...)``: the ranks of the stages with the
            weights of the embedding: the first stage, the last if they are tied, and multi-token prediction.

    Args:
        schedule: the name of the schedule, or the configuration that ``apply`` gets.
        num_ranks: the pipeline ranks.
        layout: Megatron's ``pipeline_model_parallel_layout``, needed if it has multi-token prediction (m) on another
            stage than the last.
        tied: whether the output layer shares the weights of the embedding, needed together with ``layout``.

    Raises:
        UserError: an unknown schedule, a number of chunks that it does not support, or a bad schedule file.
    """

    def __init__(
        self, schedule: str | ZeroBubbleConfig, num_ranks: int, layout: str | None = None, tied: bool = True
    ) -> None:
        own = ZeroBubbleConfig(schedule=schedule) if isinstance(schedule, str) else schedule
        source = own.sources()(num_ranks)
        self._placement, self._divides_vocabulary = source.placement, source.setup.vocabulary is not None
        chunks = self._placement.num_stages // num_ranks
        self.virtual_size = _virtual(chunks)
        self._with_embedding = () if layout is None else stages_with_embedding(predictions_of(layout), tied)
        self.embedding_ranks: Callable[..., list[int]] = embedding_ranks(self._placement, self._with_embedding)

    def build(self, make: Callable[..., torch.nn.Module]) -> list[torch.nn.Module]:
        """Build the model chunks of this rank, in the order in which ``forward_backward_func(model=...)`` takes them.

        Call it after ``apply``. ``megatron.zero_bubble.build_stages`` does the same for the schedule in force.

        Args:
            make: makes one chunk from the arguments of megatron-core's ``GPTModel`` that depend on the stage, by
                keyword: ``pre_process`` (has the embedding), ``post_process`` (has the output layer), and, with several
                stages per rank, ``vp_stage`` and the process groups (``pg_collection``; ``model_comm_pgs`` in 0.14,
                none in 0.13). It must not wrap the chunk.

        Raises:
            UserError: as ``megatron.zero_bubble.build_stages``.
        """
        return build_chunks(self._placement, self._divides_vocabulary, make, self._with_embedding)


def build_chunks(
    placement: Placement,
    divides_vocabulary: bool,
    make: Callable[..., torch.nn.Module],
    with_embedding: Collection[int] = (),
) -> list[torch.nn.Module]:
    """Build the model chunks of this rank; see ``ModelStages.build``.

    Args:
        divides_vocabulary: whether embedding and output layer are divided over all pipeline ranks.
        with_embedding: the stages that have a copy of the embedding; default: the first and the last.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    _check_sizes(placement, group.size(), parallel_state.get_virtual_pipeline_model_parallel_world_size())
    with refused_together(group):
        check_ends(placement, with_embedding, ranks_of(group))
    stages = placement.stages_of(group.rank())
    chunks = [_chunk(make, placement, stage, chunk) for chunk, stage in enumerate(stages)]
    with refused_together(group):
        check_predictions(stages, chunks)
    if divides_vocabulary:
        shard_vocabulary(chunks, placement)
    copy_embedding(chunks)
    return chunks


def _chunk(make: Callable[..., torch.nn.Module], placement: Placement, stage: int, chunk: int) -> torch.nn.Module:
    ends = {"pre_process": stage == 0, "post_process": stage == placement.num_stages - 1}
    if placement.num_stages == placement.num_ranks:
        module = make(**ends)
        _check_model(module, placement)
        return module
    rank_of_chunk = megatron_rank(placement, parallel_state.get_pipeline_model_parallel_rank(), chunk)
    with as_pipeline_rank(rank_of_chunk):
        module = make(**ends, vp_stage=chunk, **groups_argument(groups_as(rank_of_chunk)))
    _check_model(module, placement)
    module.vp_stage = chunk  # type: ignore[assignment]
    describe_state_as(module, rank_of_chunk)
    return module


def _check_sizes(placement: Placement, num_ranks: int, virtual_size: int | None) -> None:
    """Check that the model-parallel groups are those of the placement."""
    if num_ranks != placement.num_ranks:
        raise UserError(
            f"the stages are for {placement.num_ranks} pipeline ranks; got {num_ranks}; give ModelStages, or the plan, "
            "the pipeline_model_parallel_size of initialize_model_parallel"
        )
    if (virtual_size or 1) != (wanted := placement.num_stages // num_ranks):
        raise UserError(
            f"the schedule has {wanted} stages per rank, so initialize_model_parallel needs "
            f"virtual_pipeline_model_parallel_size={_virtual(wanted)}; got {virtual_size}; give it there and in the "
            "TransformerConfig"
        )


def check_ends(placement: Placement, with_embedding: Collection[int], ranks: list[int]) -> None:
    """Check that the ranks with a copy of the embedding form its group.

    Ranks sum the initial weights of a tied embedding over this group while they build their chunks, and would wait for
    each other.
    """
    if is_megatrons_own(placement):
        return
    ends = embedding_ranks(placement, with_embedding)(ranks)
    group = parallel_state.get_embedding_group(check_initialized=False)
    members = [] if group is None else ranks_of(group)
    if members != (ends if dist.get_rank() in ends else []):
        raise UserError(
            f"the stages with the embedding are on ranks {ends}, which must form the embedding group; got {members}; "
            "call apply() before initialize_model_parallel, or give it get_embedding_ranks=ModelStages(schedule, "
            "num_ranks).embedding_ranks"
        )


def check_predictions(stages: Sequence[int], chunks: Sequence[torch.nn.Module]) -> None:
    """Check that multi-token prediction shares the embedding: without the group, its copy would stay zero."""
    group = parallel_state.get_embedding_group(check_initialized=False)
    members = [] if group is None else ranks_of(group)
    for stage, chunk in zip(stages, chunks, strict=True):
        if getattr(chunk, "mtp_process", False) and dist.get_rank() not in members:
            raise UserError(
                f"the embedding group must have every rank with multi-token prediction; got it in stage {stage}, on "
                f"rank {dist.get_rank()}, which is not in that group; give initialize_model_parallel "
                "get_embedding_ranks=stages.embedding_ranks, and build the chunks with stages.build, of stages = "
                "ModelStages(schedule, num_ranks, layout=pipeline_model_parallel_layout, tied=whether the output layer "
                "shares the embedding)"
            )


def _check_model(chunk: torch.nn.Module, placement: Placement) -> None:
    """Check that a chunk has the layers of one stage."""
    wanted = placement.num_stages // placement.num_ranks
    size = get_model_config(chunk).virtual_pipeline_model_parallel_size
    if (size or 1) != wanted:
        raise UserError(
            f"the schedule has {wanted} stages per rank, so the TransformerConfig of a chunk needs "
            f"virtual_pipeline_model_parallel_size={_virtual(wanted)}; got {size}; give it there"
        )


def _virtual(num_chunks: int) -> int | None:
    """Megatron's virtual pipeline size for a number of stages per rank."""
    return num_chunks if num_chunks > 1 else None

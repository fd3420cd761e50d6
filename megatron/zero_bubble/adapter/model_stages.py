"""The stages of a schedule in a training loop of one's own: what Megatron must know of them, and their model chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import parallel_state

from megatron.zero_bubble.adapter.placement import (
    as_pipeline_rank,
    copy_tied_embedding,
    describe_state_as,
    embedding_ranks,
    groups_as,
    megatron_rank,
)
from megatron.zero_bubble.adapter.vocabulary.shards import shard_vocabulary
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.job.config import ZeroBubbleConfig


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
        embedding_ranks: for ``initialize_model_parallel(get_embedding_ranks=...)``: the ranks with the first and the
            last stage, which share the weights of a tied embedding.

    Args:
        schedule: the name of the schedule, or the configuration that ``apply`` gets.
        num_ranks: the pipeline ranks.

    Raises:
        UserError: an unknown schedule, a number of chunks that it does not support, or a bad schedule file.
    """

    def __init__(self, schedule: str | ZeroBubbleConfig, num_ranks: int) -> None:
        own = ZeroBubbleConfig(schedule=schedule) if isinstance(schedule, str) else schedule
        source = own.sources()(num_ranks)
        self._placement, self._divides_vocabulary = source.placement, source.vocabulary is not None
        chunks = self._placement.num_stages // num_ranks
        self.virtual_size = chunks if chunks > 1 else None
        self.embedding_ranks: Callable[..., list[int]] = lambda ranks, *_: embedding_ranks(self._placement)(ranks)

    def build(self, make: Callable[..., torch.nn.Module]) -> list[torch.nn.Module]:
        """Build the model chunks of this rank, in the order in which ``forward_backward_func(model=...)`` takes them.

        Call it after ``apply``.

        Args:
            make: makes one chunk from the arguments of megatron-core's ``GPTModel`` that depend on the stage, by
                keyword: ``pre_process`` (has the embedding), ``post_process`` (has the output layer), and, with several
                stages per rank, ``vp_stage`` and ``pg_collection``. It must not wrap the chunk.

        Raises:
            UserError: when the model-parallel groups are for another number of pipeline ranks.
        """
        group, placement = parallel_state.get_pipeline_model_parallel_group(), self._placement
        if group.size() != placement.num_ranks:
            raise UserError(
                f"the stages are for {placement.num_ranks} pipeline ranks; got {group.size()}; give ModelStages the "
                "pipeline_model_parallel_size of initialize_model_parallel"
            )
        chunks = [self._chunk(make, stage, chunk) for chunk, stage in enumerate(placement.stages_of(group.rank()))]
        if self._divides_vocabulary:
            shard_vocabulary(chunks, placement)
        copy_tied_embedding(chunks)
        return chunks

    def _chunk(self, make: Callable[..., torch.nn.Module], stage: int, chunk: int) -> torch.nn.Module:
        ends = {"pre_process": stage == 0, "post_process": stage == self._placement.num_stages - 1}
        if self.virtual_size is None:
            return make(**ends)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        rank_of_chunk = megatron_rank(self._placement, rank, chunk)
        with as_pipeline_rank(rank_of_chunk):
            module = make(**ends, vp_stage=chunk, pg_collection=groups_as(rank_of_chunk))
        module.vp_stage = chunk  # type: ignore[assignment]
        describe_state_as(module, rank_of_chunk)
        return module

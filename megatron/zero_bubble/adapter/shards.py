"""Sharded units on megatron-core's own buffers.

With the distributed optimizer, every parameter is a view of a buffer of ``DistributedDataParallel``, and so is its
gradient. Each bucket of a buffer divides by the number of replicas, and the optimizer steps the part of this replica.
Gathers and reductions are upstream's own functions, so a unit of all microbatches has the bits of plain data
parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megatron.zero_bubble.adapter.prepared import check_same_plan
from megatron.zero_bubble.adapter.stage import StageFacts
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Op, Plan, Schedule
from megatron.zero_bubble.job.shards import check_chunks, check_shards
from megatron.zero_bubble.plan.shard import Sharding
from megatron.zero_bubble.platforms.streams import Lane
from megatron.zero_bubble.runtime.executor import Handler
from megatron.zero_bubble.runtime.observer import IterationObserver
from megatron.zero_bubble.runtime.shards import Sharder


class DistributedChunk:
    """A model chunk as ``runtime.shards.Chunk``.

    Raises:
        UserError: the chunk is not wrapped for data parallelism, or with options that sharded units do not support.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise UserError(
                "sharded units need every model chunk in megatron-core's DistributedDataParallel; got "
                f"{type(model).__name__}; wrap it, or leave out shard_weights"
            )
        check_shards(model.ddp_config)
        self._groups: list[Any] = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
        buffers: list[Any] = [*model.buffers, *model.expert_parallel_buffers]
        self.weights: list[torch.Tensor] = [buffer.param_data for buffer in buffers]
        self.gradients: list[torch.Tensor] = [buffer.grad_data for buffer in buffers]
        buckets = [(group, bucket) for group in self._groups for bucket in group.buckets]
        self.own_weights = [_own(group, bucket.param_data) for group, bucket in buckets]
        self.own_gradients = [_own(group, bucket.grad_data) for group, bucket in buckets]

    def gather(self) -> None:
        """See ``runtime.shards.Chunk``."""
        for group in self._groups:
            group.start_param_sync(force_sync=True)

    def reduce(self) -> None:
        """See ``runtime.shards.Chunk``."""
        for group in self._groups:
            group.finish_grad_sync()


def _own(group: Any, flat: torch.Tensor) -> torch.Tensor:
    """The part of this replica in the buffer of a bucket."""
    size, rank = group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank
    return flat.view(size, -1)[rank]


class ShardedUnits:
    """The sharded units of a pipeline.

    Args:
        sharding: maps a number of pipeline ranks to how chunks are sharded over their replicas.

    Attributes:
        sharder: runs the ops; None until a plan has been made.
    """

    def __init__(self, sharding: Callable[[int], Sharding]) -> None:
        self.sharding = sharding
        self.sharder: Sharder | None = None

    def check(self, config: Any, schedule: Schedule) -> None:
        """Raise UserError for a job, or a placement of its stages, that sharded units do not support."""
        check_shards(config)
        check_chunks(schedule.placement)

    def connect(self, plan: Plan, make_lane: Callable[[], Lane]) -> None:
        """Check that all replicas run the same plan, because they gather and reduce together. A collective call.

        Raises:
            UserError: the plans differ.
        """
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        check_same_plan(plan, group, "data-parallel replicas of sharded units")
        if self.sharder is None:
            self.sharder = Sharder(make_lane())

    def handlers(self, observer: IterationObserver | None) -> Mapping[type[Op], Handler]:
        """The handlers of one iteration."""
        assert self.sharder is not None, "connect comes first"
        return self.sharder.handlers(observer)

    def iteration(
        self, stages: Sequence[StageFacts], chunks: Sequence[torch.nn.Module]
    ) -> AbstractContextManager[None]:
        """Context around the passes of an iteration, in which the chunks are shards.

        Raises:
            UserError: see ``DistributedChunk``.
        """
        assert self.sharder is not None, "connect comes first"
        pairs = zip(stages, chunks, strict=True)
        return self.sharder.iteration({facts.stage: DistributedChunk(chunk) for facts, chunk in pairs})

    @contextmanager
    def finalizing(self, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Context in which ``finish_grad_sync`` of the chunks does nothing: their gradients are reduced already."""
        with ExitStack() as restored:
            for chunk in chunks:
                chunk.finish_grad_sync = _nothing  # type: ignore[assignment]
                restored.callback(delattr, chunk, "finish_grad_sync")
            yield

    def close(self) -> None:
        """Stop the lane."""
        if self.sharder is not None:
            self.sharder.close()
            self.sharder = None


def _nothing(force_all_reduce: bool | None = False) -> None:
    """Take the place of ``finish_grad_sync``.

    Raises:
        UserError: the job asks for whole sums on every replica.
    """
    if force_all_reduce:
        raise UserError(
            "sharded units leave on every replica only its shard of the gradients; got force_all_reduce=True; leave it "
            "out, or train without shard_weights"
        )

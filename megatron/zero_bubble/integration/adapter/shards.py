"""Sharded units on megatron-core's own buffers.

With the distributed optimizer, every parameter is a view of a buffer of ``DistributedDataParallel``, and so is its
gradient. Each bucket of a buffer divides by the number of replicas, and the optimizer steps the part of this replica.
Gathers and reductions are upstream's own functions, so a unit of all microbatches has the bits of plain data
parallelism.

Experts have buffers and replicas of their own. A chunk gathers both in one op of the plan. Where expert parallelism
leaves one replica of the experts, there is nothing to shard: they stay whole, and their gradients are finished where
Megatron finishes those of a job without sharded units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Op, Plan, Schedule
from megatron.zero_bubble.core.ir.shards import ReleaseWeights
from megatron.zero_bubble.core.plan.shard import Sharding, check_chunks, shard
from megatron.zero_bubble.engine.runtime.groups import backend_of
from megatron.zero_bubble.engine.runtime.handler import Handler
from megatron.zero_bubble.engine.runtime.shards import Sharder
from megatron.zero_bubble.integration.adapter.finalize import Finalize
from megatron.zero_bubble.integration.adapter.part import Call, IterationFacts, Joined, Part
from megatron.zero_bubble.integration.adapter.placement import has_copies_of_embedding, has_vocabulary
from megatron.zero_bubble.integration.adapter.prepared import Lowering, check_same_plan
from megatron.zero_bubble.integration.adapter.replicas import ReplicaComparison
from megatron.zero_bubble.integration.adapter.sharded_step import (
    BucketPlace,
    SteppedChunk,
    check_optimizer,
    step_shards,
)
from megatron.zero_bubble.integration.adapter.versions import skips_stages_without_embedding
from megatron.zero_bubble.planning.exclusions import SHARDS
from megatron.zero_bubble.planning.job.options import check_options_of


class DistributedChunk:
    """A model chunk as ``runtime.shards.Chunk``, without experts that have one replica.

    Attributes:
        buffers, buckets: megatron-core's, of what is sharded.
        num_dense: how many of the buckets, the first ones, are not of experts.

    Raises:
        UserError: the chunk is not wrapped for data parallelism, or with options that sharded units do not support.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise UserError(
                "sharded units need every model chunk in megatron-core's DistributedDataParallel; got "
                f"{type(model).__name__}; wrap it, or leave out shard_weights"
            )
        check_options_of(SHARDS, model.ddp_config)
        self.model = model
        # All experts of a job have equally many replicas.
        shared = () if _whole_groups(model) else model.expert_parallel_bucket_groups
        self._groups: list[Any] = [*model.bucket_groups, *shared]
        self.buffers: list[Any] = [*model.buffers, *(model.expert_parallel_buffers if shared else ())]
        self.weights: list[torch.Tensor] = [buffer.param_data for buffer in self.buffers]
        self.gradients: list[torch.Tensor] = [buffer.grad_data for buffer in self.buffers]
        buckets = [(group, bucket) for group in self._groups for bucket in group.buckets]
        self.buckets: list[Any] = [bucket for _, bucket in buckets]
        self.num_dense = sum(len(group.buckets) for group in model.bucket_groups)
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


def _whole_groups(chunk: Any) -> list[Any]:
    """Megatron-core's groups of buckets of the experts that stay whole."""
    return [group for group in chunk.expert_parallel_bucket_groups if _num_replicas(group) == 1]


def _num_replicas(group: Any) -> int:
    return int(group.intra_distributed_optimizer_instance_size)


def _own(group: Any, flat: torch.Tensor) -> torch.Tensor:
    """The part of this replica in the buffer of a bucket."""
    part: torch.Tensor = flat.view(_num_replicas(group), -1)[group.intra_distributed_optimizer_instance_rank]
    return part


class ShardTransport(Protocol):
    """Exchanges the shards of the replicas of a pipeline.

    Attributes:
        is_collective: whether all replicas must run the same plans. Only then, chunks may stay shards between
            iterations.
    """

    is_collective: bool

    def connect(self, plan: Plan, has_experts: bool) -> None:
        """Prepare for a plan of a model that may have experts. A collective call."""

    def iteration(
        self, models: Mapping[int, torch.nn.Module]
    ) -> AbstractContextManager[Mapping[int, DistributedChunk]]:
        """Context around an iteration; yields the chunks by stage."""

    def close(self) -> None:
        """End the exchange."""


class Collectives:
    """Exchanges shards by megatron-core's collectives, which all replicas start in the same order."""

    is_collective = True

    def connect(self, plan: Plan, has_experts: bool) -> None:
        """Check that all replicas run the same plan. This also joins their group, before any pass runs.

        Raises:
            UserError: the plans differ.
        """
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        check_same_plan(plan, group, "data-parallel replicas of sharded units")

    @contextmanager
    def iteration(self, models: Mapping[int, torch.nn.Module]) -> Iterator[Mapping[int, DistributedChunk]]:
        """See ``ShardTransport``."""
        yield {stage: DistributedChunk(model) for stage, model in models.items()}

    def close(self) -> None:
        """See ``ShardTransport``."""


class ShardedUnits(Part):
    """The sharded units of a pipeline.

    Args:
        sharding: maps a number of pipeline ranks to how chunks are sharded over their replicas.
        transport: exchanges the shards.
        timeout: how long a replica may take to begin the same iteration; None for the job's.

    Attributes:
        sharder: runs the ops; None until a plan has been made.
    """

    def __init__(
        self, sharding: Callable[[int], Sharding], transport: ShardTransport, timeout: timedelta | None = None
    ) -> None:
        self._sharding = sharding
        self._transport, self._timeout = transport, timeout
        self._comparison: ReplicaComparison | None = None
        self.sharder: Sharder | None = None
        self._optimizer: Any = None
        self._stages: tuple[int, ...] = ()  # of the chunks that are kept as shards
        self._has_experts = False
        self._copies_meet = False  # whether any rank of the pipeline has an embedding and a copy of it
        self._restored = ExitStack()

    @property
    def steps_shards(self) -> bool:
        return self._optimizer is not None

    @property
    def are_shards(self) -> bool:
        """Whether chunks are shards now, between iterations."""
        return self.sharder is not None and self.sharder.keeps

    def _leaves_whole(self, forward_only: bool) -> bool:
        """Whether chunks are not shards in an iteration: an evaluation may find whole chunks."""
        return forward_only and not self.steps_shards

    def lowering(self, schedule: Schedule, forward_only: bool) -> Lowering | None:
        if self._leaves_whole(forward_only):
            return None
        sharding = self._sharding(schedule.num_ranks)
        return Lowering(partial(shard, sharding=sharding), (sharding,))

    def step_shards(self, optimizer: Any) -> None:
        """Keep the chunks as shards from the next iteration on, in which ``optimizer`` steps them in place.

        Load checkpoints before that. Afterwards, read weights only in ``whole_weights``. Without effect if the exchange
        is not collective.

        Raises:
            UserError: an optimizer that cannot step shards.
        """
        if self._transport.is_collective:
            check_optimizer(optimizer)
            self._optimizer = optimizer

    def check(self, config: Any, schedule: Schedule) -> None:
        """See ``Part``. Also wait for the answer to ``begin``: only then, a new plan may be made."""
        self.agree()
        check_options_of(SHARDS, config)
        check_chunks(schedule.placement)
        self._has_experts = getattr(config, "num_moe_experts", None) is not None

    def begin(self, call: Call) -> None:
        """Begin to check that all replicas run the same iteration. A collective call of every iteration: a replica that
        changes its microbatches alone would be the only one that makes a new plan.

        The answer is read by ``agree``: at the latest when the first passes are queued, and over gloo here, because the
        host waits for the other replicas in the first gather anyway.

        Raises:
            UserError: see ``agree``.
        """
        num_microbatches, forward_only = call.step.num_microbatches, call.step.forward_only
        if not self._transport.is_collective or self._leaves_whole(forward_only):
            return  # a replica then runs on its own
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if self._comparison is None or self._comparison.replicas is not group:
            self._comparison = ReplicaComparison(group, self._timeout)
        self._comparison.start(num_microbatches, forward_only)
        if backend_of(group) == "gloo":
            self.agree()

    def agree(self) -> None:
        """Wait for the answer to ``begin``, unless it is known.

        Raises:
            UserError: replicas have different numbers of microbatches, or only some of them evaluate.
            PeerError: a replica died.
        """
        if self._comparison is not None:
            self._comparison.check()

    def connect(self, to: Joined) -> None:
        """See ``Part``.

        Raises:
            UserError: the replicas run different plans, and their exchange is collective.
        """
        self._transport.connect(to.plan, self._has_experts)
        if self.sharder is None:
            self.sharder = Sharder(to.platform.lane(), to.watchdog)

    def handlers(self, iteration: IterationFacts) -> Mapping[type[Op], Handler]:
        assert self.sharder is not None, "connect comes first"
        by_op = self.sharder.handlers(iteration.observer)
        release = by_op[ReleaseWeights]

        def release_and_agree(op: Op, inputs: Sequence[Any]) -> Any:
            self.agree()  # the passes of the first run of a stage are queued
            return release(op, inputs)

        return {**by_op, ReleaseWeights: release_and_agree}

    @contextmanager
    def iteration(self, iteration: IterationFacts) -> Iterator[None]:
        """See ``Part``. The chunks are shards, unless an evaluation finds them whole.

        Raises:
            UserError: see ``DistributedChunk``.
        """
        assert self.sharder is not None, "connect comes first"
        if self._leaves_whole(iteration.forward_only):
            yield
            return
        stages = (facts.stage for facts in iteration.prepared.stages)
        models = dict(zip(stages, iteration.call.chunks, strict=True))
        with nullcontext({}) if self.sharder.keeps else self._transport.iteration(models) as of_stage:
            if of_stage and self.steps_shards:
                self._keep(of_stage)
            with self.sharder.iteration(of_stage):
                yield

    def _keep(self, of_stage: Mapping[int, DistributedChunk]) -> None:
        assert self.sharder is not None, "connect comes first"
        self._stages = tuple(of_stage)
        self.sharder.keep(of_stage)
        places = {
            id(bucket): BucketPlace(self.sharder.shards(stage), number)
            for stage, chunk in of_stage.items()
            for number, bucket in enumerate(chunk.buckets)
        }
        self._copies_meet = _any_has_several([own.model for own in of_stage.values()])
        chunks = [SteppedChunk(own.model, own.buffers) for own in of_stage.values()]
        step_shards(self._optimizer, chunks, places, self._restored)

    @contextmanager
    def whole_weights(self, chunk: int | None = None) -> Iterator[None]:
        """Context in which the weights of one chunk of the rank, or of all, are whole, and can be read.

        A collective call of the data-parallel replicas. Without effect while the chunks are whole anyway.
        """
        if self.sharder is None or not self.are_shards:
            yield
            return
        with self.sharder.whole_weights(self._stages if chunk is None else self._stages[chunk : chunk + 1]):
            yield

    def finalizing(self, finalize: Finalize) -> Finalize:
        return partial(self._finalize, finalize)

    def _finalize(self, run: Finalize, chunks: list[torch.nn.Module], num_tokens: torch.Tensor | None) -> None:
        """Run Megatron's steps between the passes and the optimizer: for one chunk after the other, of which only one
        then has gradients of its whole size.
        """
        with ExitStack() as restored:
            for chunk in chunks:
                chunk.finish_grad_sync = partial(_finish_whole, _whole_groups(chunk))  # type: ignore[assignment]
                restored.callback(delattr, chunk, "finish_grad_sync")
            if self.sharder is None or not self.are_shards:
                run(chunks, num_tokens)
                return
            # The copies of an embedding come first on their ranks, which add up its gradients, as all ranks wait for
            # each other for every chunk. If they are on one rank, it adds from one chunk to the other.
            order = sorted(range(len(chunks)), key=lambda index: not has_vocabulary(chunks[index]))
            copied = has_copies_of_embedding(chunks[0])
            together = copied and (self._copies_meet or not skips_stages_without_embedding())
            for indices in [range(len(chunks))] if together else [(index,) for index in order]:
                with self.sharder.whole_gradients([self._stages[index] for index in indices]):
                    run([chunks[index] for index in indices], None if num_tokens is None else num_tokens.clone())

    def close(self) -> None:
        """Stop the exchange and the lane.

        Chunks that are shards get their memory back, with NaN where they had no shard.
        """
        self._transport.close()
        if self._comparison is not None:
            self._comparison.close()
            self._comparison = None
        if self.sharder is not None:
            self.sharder.close()
            self.sharder = None
        self._restored.close()
        self._stages = ()


def _any_has_several(models: Sequence[torch.nn.Module]) -> bool:
    """Whether any rank of the pipeline has several chunks with a part of the vocabulary. A collective call of them."""
    several = torch.tensor(
        sum(map(has_vocabulary, models)) > 1, dtype=torch.int32, device=next(models[0].parameters()).device
    )
    torch.distributed.all_reduce(several, group=parallel_state.get_pipeline_model_parallel_group())
    return bool(several)


def _finish_whole(groups: Sequence[Any], force_all_reduce: bool | None = False) -> None:
    """Take the place of ``finish_grad_sync``: passes have reduced all gradients but those of ``groups``.

    Raises:
        UserError: the job asks for whole sums on every replica.
    """
    if force_all_reduce:
        raise UserError(
            "sharded units leave on every replica only its shard of the gradients; got force_all_reduce=True; leave it "
            "out, or train without shard_weights"
        )
    for group in groups:
        group.finish_grad_sync()

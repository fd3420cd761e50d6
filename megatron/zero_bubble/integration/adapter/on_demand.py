"""Sharded units whose replicas exchange shards on demand, and need not run the same plan. Experimental."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.engine.runtime.groups import backend_of
from megatron.zero_bubble.engine.runtime.on_demand import ShardExchange, ShardKey
from megatron.zero_bubble.engine.runtime.symmetric import SymmetricExchange, check_hosts
from megatron.zero_bubble.integration.adapter.shards import DistributedChunk

Exchange = ShardExchange | SymmetricExchange


class OnDemandChunk(DistributedChunk):
    """A model chunk as ``runtime.shards.Chunk``, whose gradients are complete when all replicas have ended.

    Args:
        exchange, of_experts: those of the replicas, and of the replicas of experts; None if these have one replica.
    """

    def __init__(self, model: torch.nn.Module, stage: int, exchange: Exchange, of_experts: Exchange | None) -> None:
        super().__init__(model)
        self._is_mean = any(group.ddp_config.average_in_collective for group in self._groups)
        self._keys = [(stage, number) for number in range(len(self.buckets))]
        own = [exchange] * self.num_dense + [of_experts or exchange] * (len(self.buckets) - self.num_dense)
        self.exchanges = dict(zip(self._keys, own, strict=True))
        self.dtypes = {key: own.dtype for key, own in zip(self._keys, self.own_gradients, strict=True)}
        self.shards = {key: shard.clone() for key, shard in zip(self._keys, self.own_weights, strict=True)}

    def gather(self) -> None:
        """See ``runtime.shards.Chunk``."""
        for key, bucket in zip(self._keys, self.buckets, strict=True):
            exchange = self.exchanges[key]
            for replica, part in enumerate(bucket.param_data.view(exchange.size, -1)):
                if replica != exchange.rank:
                    exchange.fetch(key, replica, part)

    def reduce(self) -> None:
        """Send every replica its part; the own sum is left for ``complete``, and here counts as 0."""
        for group in self._groups:
            if group.ddp_config.check_for_nan_in_grad or group.ddp_config.check_for_large_grads:
                group.check_grads(
                    check_for_nan_or_inf=group.ddp_config.check_for_nan_in_grad,
                    check_for_large=group.ddp_config.check_for_large_grads,
                )
        for key, bucket, own in zip(self._keys, self.buckets, self.own_gradients, strict=True):
            exchange = self.exchanges[key]
            scale = bucket.gradient_scaling_factor / (exchange.size if self._is_mean else 1)
            if scale != 1.0:
                bucket.grad_data *= scale
            for replica, part in enumerate(bucket.grad_data.view(exchange.size, -1)):
                exchange.add(key, replica, part)
            own.zero_()

    def complete(self, sums: Mapping[ShardKey, torch.Tensor]) -> None:
        """Set the own gradients to the sums of all replicas."""
        for key, own in zip(self._keys, self.own_gradients, strict=True):
            if key in sums:
                own.copy_(sums[key])


class OnDemand:
    """Exchanges shards on demand; see ``adapter.shards.ShardTransport``."""

    is_collective = False

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._exchange: Exchange | None = None
        self._of_experts: Exchange | None = None

    def connect(self, _plan: Plan, has_experts: bool) -> None:
        """Begin to serve the other replicas; their plans may differ. A collective call the first time.

        Raises:
            UserError: on every rank, if replicas on GPUs cannot reach each other's memory.
        """
        if self._exchange is not None:
            return
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._exchange = self._made(group)
        if has_experts and (of_experts := parallel_state.get_expert_data_parallel_group()).size() > 1:
            members = [dist.get_process_group_ranks(each) for each in (group, of_experts)]
            self._of_experts = self._exchange if members[0] == members[1] else self._made(of_experts)

    def _made(self, group: dist.ProcessGroup) -> Exchange:
        if backend_of(group) == "gloo":
            return ShardExchange(group, self._timeout)
        from torch.distributed import _symmetric_memory  # defines operators when it is imported

        backend_on = getattr(_symmetric_memory, "get_backend", lambda _device: None)  # since torch 2.9
        check_hosts(group, backend_on("cuda"))
        return SymmetricExchange(group, _symmetric_memory, self._timeout)

    @contextmanager
    def iteration(self, models: Mapping[int, torch.nn.Module]) -> Iterator[Mapping[int, DistributedChunk]]:
        """Context around the passes of an iteration, outside of which everything is whole."""
        exchange, of_experts = self._exchange, self._of_experts
        assert exchange is not None, "connect comes first"
        chunks = {stage: OnDemandChunk(model, stage, exchange, of_experts) for stage, model in models.items()}
        by_key, shards, dtypes = (
            {key: value for own in chunks.values() for key, value in getattr(own, name).items()}
            for name in ("exchanges", "shards", "dtypes")
        )
        used = list({id(each): each for each in by_key.values()}.values())  # ranks of one group have the same stages
        for each in used:
            each.publish(*({key: of[key] for key, its in by_key.items() if its is each} for of in (shards, dtypes)))
        yield chunks
        sums = {key: total for each in used for key, total in each.end().items()}
        for own in chunks.values():
            own.complete(sums)

    def close(self) -> None:
        for exchange in {id(each): each for each in (self._exchange, self._of_experts) if each is not None}.values():
            exchange.close()
        self._exchange = self._of_experts = None

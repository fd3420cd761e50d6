"""Sharded units whose replicas exchange shards on demand, and need not run the same plan. Experimental."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
from megatron.core import parallel_state

from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.engine.runtime.groups import backend_of
from megatron.zero_bubble.engine.runtime.on_demand import ShardExchange
from megatron.zero_bubble.engine.runtime.symmetric import SymmetricExchange, check_hosts
from megatron.zero_bubble.integration.adapter.shards import DistributedChunk


class OnDemandChunk(DistributedChunk):
    """A model chunk as ``runtime.shards.Chunk``, whose gradients are complete when all replicas have ended."""

    def __init__(self, model: torch.nn.Module, stage: int, exchange: ShardExchange | SymmetricExchange) -> None:
        super().__init__(model)
        self._exchange = exchange
        self._is_mean = any(group.ddp_config.average_in_collective for group in self._groups)
        self._keys = [(stage, number) for number in range(len(self.buckets))]
        self.dtypes = {key: own.dtype for key, own in zip(self._keys, self.own_gradients, strict=True)}
        self.shards = {key: shard.clone() for key, shard in zip(self._keys, self.own_weights, strict=True)}

    def gather(self) -> None:
        """See ``runtime.shards.Chunk``."""
        exchange = self._exchange
        for key, bucket in zip(self._keys, self.buckets, strict=True):
            for replica, part in enumerate(bucket.param_data.view(exchange.size, -1)):
                if replica != exchange.rank:
                    exchange.fetch(key, replica, part)

    def reduce(self) -> None:
        """Send every replica its part; the own sum is left for ``complete``, and here counts as 0."""
        exchange = self._exchange
        for group in self._groups:
            if group.ddp_config.check_for_nan_in_grad or group.ddp_config.check_for_large_grads:
                group.check_grads(
                    check_for_nan_or_inf=group.ddp_config.check_for_nan_in_grad,
                    check_for_large=group.ddp_config.check_for_large_grads,
                )
        for key, bucket, own in zip(self._keys, self.buckets, self.own_gradients, strict=True):
            scale = bucket.gradient_scaling_factor / (exchange.size if self._is_mean else 1)
            if scale != 1.0:
                bucket.grad_data *= scale
            for replica, part in enumerate(bucket.grad_data.view(exchange.size, -1)):
                exchange.add(key, replica, part)
            own.zero_()

    def complete(self, sums: Mapping[tuple[int, int], torch.Tensor]) -> None:
        """Set the own gradients to the sums of all replicas."""
        for key, own in zip(self._keys, self.own_gradients, strict=True):
            if key in sums:
                own.copy_(sums[key])


class OnDemand:
    """Exchanges shards on demand; see ``adapter.shards.ShardTransport``."""

    is_collective = False

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._exchange: ShardExchange | SymmetricExchange | None = None

    def connect(self, _plan: Plan) -> None:
        """Begin to serve the other replicas; their plans may differ. A collective call the first time.

        Raises:
            UserError: on every rank, if replicas on GPUs cannot reach each other's memory.
        """
        if self._exchange is not None:
            return
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if backend_of(group) == "gloo":
            self._exchange = ShardExchange(group, self._timeout)
        else:
            from torch.distributed import _symmetric_memory  # defines operators when it is imported

            backend_on = getattr(_symmetric_memory, "get_backend", lambda _device: None)  # since torch 2.9
            check_hosts(group, backend_on("cuda"))
            self._exchange = SymmetricExchange(group, _symmetric_memory, self._timeout)

    @contextmanager
    def iteration(self, models: Mapping[int, torch.nn.Module]) -> Iterator[Mapping[int, DistributedChunk]]:
        """Context around the passes of an iteration, outside of which everything is whole."""
        assert self._exchange is not None, "connect comes first"
        chunks = {stage: OnDemandChunk(model, stage, self._exchange) for stage, model in models.items()}
        shards, dtypes = (
            {key: value for own in chunks.values() for key, value in getattr(own, name).items()}
            for name in ("shards", "dtypes")
        )
        self._exchange.publish(shards, dtypes)
        yield chunks
        sums = self._exchange.end()
        for own in chunks.values():
            own.complete(sums)

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

"""Shards of data-parallel replicas on demand, in memory that every GPU of the group can read and write.

The one-sided form of ``runtime.on_demand``: a replica copies the shards of the others out of their memory, and adds its
parts of gradients to a place of its own in theirs. Nobody answers, so no thread is needed, and no replica waits for
another between the beginning and the end of an iteration. Written against torch 2.8's ``_symmetric_memory`` and tested
with a stand-in; no GPU has run it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.runtime.on_demand import ShardKey


class SymmetricMemory(Protocol):
    """The part of ``torch.distributed._symmetric_memory`` that is used."""

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> Any: ...


_BETWEEN_HOSTS = "NVSHMEM"
"""The backend of torch's symmetric memory that reaches GPUs of other hosts; the others need peer access."""


def check_hosts(group: dist.ProcessGroup, backend: str | None) -> None:
    """Check that the replicas ``group`` can reach each other's memory. A collective call of all ranks of the job.

    Args:
        backend: that of torch's symmetric memory; None if torch does not say.

    Raises:
        UserError: on every rank, if any group of replicas has GPUs on several hosts, which the backend cannot reach.
    """
    every: list[tuple[str, list[int], str | None]] = [("", [], None)] * dist.get_world_size()
    dist.all_gather_object(every, (socket.gethostname(), dist.get_process_group_ranks(group), backend))
    for _, members, own in every:
        hosts = sorted({every[member][0] for member in members})
        if len(hosts) > 1 and own != _BETWEEN_HOSTS:
            raise UserError(
                "shards on demand need GPUs that can access each other's memory: those of one host, or torch's "
                f"symmetric memory over {_BETWEEN_HOSTS}; got the data-parallel replicas of ranks {members} on "
                f"{', '.join(hosts)} with the backend {own}; set TORCH_SYMMMEM={_BETWEEN_HOSTS} with a torch that has "
                "it, place the replicas on one host, or exchange shards by collectives"
            )


class SymmetricExchange:
    """The shards of this rank in symmetric memory; see ``on_demand.Exchange`` for the methods.

    A place for every replica takes, together, the memory of the whole gradients of the rank's stages.

    Args:
        group: the replicas, on GPUs that can access each other's memory.
        memory: allocates symmetric memory; the call that makes it accessible is collective.
        timeout: how long the replicas may wait for each other; None for no limit.
    """

    def __init__(self, group: dist.ProcessGroup, memory: SymmetricMemory, timeout: timedelta | None = None) -> None:
        self._timeout_ms = 0 if timeout is None else int(timeout.total_seconds() * 1000)
        self.rank, self.size = group.rank(), group.size()
        self._group, self._memory = group, memory
        self._shards: dict[ShardKey, tuple[torch.Tensor, Any]] = {}
        self._parts: dict[ShardKey, tuple[torch.Tensor, Any]] = {}

    def publish(self, shards: Mapping[ShardKey, torch.Tensor], dtypes: Mapping[ShardKey, torch.dtype]) -> None:
        """Begin an iteration with these shards of weights, and gradients of these types. A collective call."""
        for key, shard in sorted(shards.items()):
            if key not in self._shards:
                self._shards[key] = self._allocate(shard, 1, shard.dtype)
                self._parts[key] = self._allocate(shard, self.size, dtypes[key])
                self._parts[key][0].zero_()
            self._shards[key][0][0].copy_(shard)
        self._barrier()

    def fetch(self, key: ShardKey, replica: int, into: torch.Tensor) -> None:
        """Fill ``into`` with a shard of another replica."""
        own, handle = self._shards[key]
        into.copy_(handle.get_buffer(replica, tuple(own.shape), own.dtype)[0])

    def add(self, key: ShardKey, replica: int, part: torch.Tensor) -> None:
        """Add ``part`` to the place of this rank in the memory of a replica. No other rank writes there."""
        own, handle = self._parts[key]
        handle.get_buffer(replica, tuple(own.shape), own.dtype)[self.rank].add_(part)

    def end(self) -> dict[ShardKey, torch.Tensor]:
        """End the iteration when all replicas have ended it; returns the sums of this rank, added in rank order.

        A collective call.
        """
        self._barrier()
        sums = {}
        for key, (parts, _) in self._parts.items():
            total = parts[0].clone()
            for part in parts[1:]:
                total.add_(part)
            sums[key] = total
            parts.zero_()
        return sums

    def close(self) -> None:
        self._shards.clear()
        self._parts.clear()

    def _allocate(self, shard: torch.Tensor, number: int, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        own = self._memory.empty(number, shard.numel(), dtype=dtype, device=shard.device)
        return own, self._memory.rendezvous(own, self._group)

    def _barrier(self) -> None:
        """Let the passes that follow wait until those before it have ended on all replicas."""
        _, handle = next(iter(self._shards.values()))
        handle.barrier(timeout_ms=self._timeout_ms)

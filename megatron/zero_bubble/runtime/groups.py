"""Process groups that torch.distributed makes for this package: for the messages of a pipeline, and for others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

from megatron.zero_bubble.job.config import DEFAULT_NCCL_CTAS
from megatron.zero_bubble.runtime.nccl import DEFAULT_TIMEOUT, options_beside_passes


@dataclass(frozen=True)
class Directions:
    """The process groups for the messages of one pipeline, one per direction, as one of its ranks uses them.

    With NCCL, a group has a communicator for every pair of its ranks, if they are created lazily. One group per
    direction therefore gives every channel a communicator of its own. A communicator that is created eagerly, as after
    ``init_process_group(device_id=...)``, holds all ranks of its group, and plans can deadlock (``Queues.DIRECTION``).

    Attributes:
        rank: the pipeline rank.
        peers: the rank of every pipeline rank within the groups.
        backend: ``nccl`` or ``gloo``.
        device: the type of the devices whose memory is sent.
        groups: the group of the messages to higher ranks (True) and to lower ranks (False).
    """

    rank: int
    peers: Sequence[int]
    backend: str
    device: str
    groups: Mapping[bool, dist.ProcessGroup]

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, timeout: timedelta | None = None, nccl_ctas: int = DEFAULT_NCCL_CTAS
    ) -> Directions:
        """Make the groups for the pipeline ``group``. A collective call of all ranks of the job.

        Args:
            timeout: maximum time that a message may take; None is the default of torch.distributed.
            nccl_ctas: the largest number of CTAs that a transfer of NCCL occupies, unless ``group`` has its own.
        """
        backend, ranks = backend_of(group), dist.get_process_group_ranks(group)
        # They are joined channel by channel (``Transport.open``), because each pair has a communicator of its own.
        groups = {up: _made(ranks, *_beside_passes(group, timeout, nccl_ctas)) for up in (True, False)}
        # torch.distributed sorts the ranks of a new group.
        peers = [dist.get_group_rank(groups[True], rank) for rank in ranks]
        return cls(group.rank(), peers, backend, "cpu" if backend == "gloo" else "cuda", groups)

    def close(self) -> None:
        """Destroy the process groups; no message may be in flight."""
        destroy(*self.groups.values())


def group_beside_passes(
    group: dist.ProcessGroup, timeout: timedelta | None = None, nccl_ctas: int = DEFAULT_NCCL_CTAS
) -> dist.ProcessGroup:
    """A new group of the ranks of ``group``, joined, for collectives that run concurrently with passes.

    A collective call of all ranks of the job; the arguments are those of ``Directions.of``.
    """
    return new_group(dist.get_process_group_ranks(group), *_beside_passes(group, timeout, nccl_ctas))


def _beside_passes(
    group: dist.ProcessGroup, timeout: timedelta | None, nccl_ctas: int
) -> tuple[str, timedelta | None, Callable[[], Any]]:
    """The backend, the timeout and the maker of the options of a group for transfers beside passes."""
    backend = backend_of(group)
    if backend != "nccl":
        return backend, timeout, _no_options
    timeout = timeout or DEFAULT_TIMEOUT
    return backend, timeout, partial(options_beside_passes, group, nccl_ctas, timeout)


def backend_of(group: dist.ProcessGroup) -> str:
    """The backend of the messages between stages: where torch has one per type of device, that of GPUs.

    torch names such a group ``cpu:gloo,cuda:nccl``, or ``undefined`` after ``init_process_group()`` without a backend.
    """
    of_devices = BackendConfig(Backend(dist.get_backend(group))).get_device_backend_map()
    return str(of_devices.get("cuda") or next(iter(of_devices.values())))


def _no_options() -> None:
    return None


def new_group(
    ranks: Iterable[int],
    backend: str,
    timeout: timedelta | None = None,
    options: Callable[[], Any] = _no_options,
) -> dist.ProcessGroup:
    """A new group over ``ranks``, which all of them have joined.

    A collective call: every rank of the job passes the ranks of its own new group. A communicator of NCCL is created in
    the first collective of its group, where the host waits until all ranks take part. Among the passes, whose order
    differs between ranks, two hosts could wait for each other there; here, all ranks join their groups in one order.

    Args:
        options: makes the options of a group; called once per group.
    """
    group = _made(ranks, backend, timeout, options)
    token = torch.zeros(1, device="cuda" if backend_of(group) == "nccl" else "cpu")
    group.allreduce([token]).wait()
    token.item()  # with NCCL, the wait before was that of the GPU
    return group


def _made(
    ranks: Iterable[int], backend: str, timeout: timedelta | None, options: Callable[[], Any]
) -> dist.ProcessGroup:
    """A new group that nobody has joined; see ``new_group``.

    torch.distributed creates groups collectively, so every rank creates all of them, in the same order. (With
    ``use_local_synchronization``, a group's name contains a counter that may differ between ranks, which hangs.)
    """
    own = tuple(ranks)
    wanted: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(wanted, own)
    with _created_lazily():
        made = {
            of: dist.new_group(list(of), timeout=timeout, backend=backend, pg_options=options())
            for of in sorted(set(wanted))
        }
    return made[own]


def destroy(*groups: dist.ProcessGroup) -> None:
    """Destroy process groups; no message may be in flight.

    Their threads end, and their connections close, with the last reference to them.
    """
    if dist.is_initialized():
        for group in groups:
            dist.destroy_process_group(group)


@contextmanager
def _created_lazily() -> Iterator[None]:
    """New groups create NCCL's communicators when they are used, one per pair of ranks for sends and receives.

    torch creates them eagerly, for all ranks of the group, if the default group is bound to a device.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound

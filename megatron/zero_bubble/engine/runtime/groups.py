"""Process groups that torch.distributed makes for this package: for the messages of a pipeline, and for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Backend, BackendConfig

from megatron.zero_bubble.core.ir.ops import Channel
from megatron.zero_bubble.engine.runtime.backends import is_nccl
from megatron.zero_bubble.engine.runtime.nccl import DEFAULT_TIMEOUT, options_beside_passes

_OURS = "zero-bubble"
"""The description in torch of all groups that are made here."""
_CUT_TAG = 2**20
"""The tag of messages that nobody sends."""
_WHY = "cut"
"""Where the store of a group says why it was cut."""


class _Options(NamedTuple):
    """How groups are made; ``nccl`` makes the options of one group of NCCL, because torch writes its name into them."""

    backend: str
    timeout: timedelta | None = None
    nccl: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Directions:
    """The process groups for the messages of one pipeline, as one of its ranks uses them.

    With NCCL, every channel has a group of its two ranks. The transfers of a communicator run in the order in which
    they were issued, so if it held all ranks, plans could deadlock (``Queues.DIRECTION``). All implementations of NCCL
    in torch give a group of two ranks a communicator of its own, whether they create it lazily or with the group. Other
    backends have a group of all ranks per direction, because their messages do not wait for each other.

    Attributes:
        rank: the pipeline rank.
        ranks: the rank within the job, by pipeline rank.
        backend: the name in torch of the backend for messages.
        groups: the group of each channel with NCCL, else of the messages to higher ranks (True) and to lower ones.
        options: how groups are made.
    """

    rank: int
    ranks: Sequence[int]
    backend: str
    groups: dict[Channel | bool, dist.ProcessGroup]
    options: _Options = _Options("gloo")  # noqa: RUF009 (an immutable value)

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout: timedelta | None = None, nccl_ctas: int | None = None) -> Directions:
        """Describe the groups for the pipeline ``group``, and make those that need no channel.

        A collective call of all ranks of the job.

        Args:
            timeout: maximum time that a message may take; None is the job's.
            nccl_ctas: the largest number of CTAs that a transfer of NCCL occupies, unless ``group`` has its own; None
                for NCCL's default.
        """
        ranks, options = ranks_of(group), _beside_passes(group, timeout, nccl_ctas)
        groups: dict[Channel | bool, dist.ProcessGroup] = {}
        if not is_nccl(options.backend):
            groups = {up: _made([ranks], options)[0] for up in (True, False)}
        return cls(group.rank(), ranks, options.backend, groups, options)

    @property
    def device(self) -> str:
        """The type of the devices whose memory is sent."""
        return device_type(self.backend)

    def open(self, channels: Sequence[Channel]) -> None:
        """Make the groups of new channels, in their order, which nobody has joined yet.

        With NCCL, a collective call of all ranks of the job: those of every pipeline give the same channels.
        """
        if is_nccl(self.backend) and channels:
            made = _made([[self.ranks[end] for end in channel] for channel in channels], self.options)
            self.groups.update(zip(channels, made, strict=True))

    def route(self, channel: Channel) -> tuple[dist.ProcessGroup, int]:
        """The group for the messages of an open channel of this rank, and the rank in it of the other end."""
        alone = is_nccl(self.backend)
        group = self.groups[channel if alone else channel[0] < channel[1]]
        source, target = channel
        # torch.distributed sorts the ranks of a new group.
        members = sorted(self.ranks[end] for end in channel) if alone else sorted(self.ranks)
        return torchs(group), members.index(self.ranks[target if self.rank == source else source])

    def group_and_root(self, source: int) -> tuple[dist.ProcessGroup, int]:
        """A group of all ranks, which there is without NCCL, and the rank in it of a pipeline rank."""
        return torchs(self.groups[True]), sorted(self.ranks).index(self.ranks[source])

    def close(self) -> None:
        """Destroy the process groups; no message may be in flight."""
        destroy(*self.groups.values())


def group_beside_passes(
    group: dist.ProcessGroup, timeout: timedelta | None = None, nccl_ctas: int | None = None
) -> dist.ProcessGroup:
    """A new group of the ranks of ``group``, joined, for collectives that run concurrently with passes.

    A collective call of all ranks of the job; the arguments are those of ``Directions.of``.
    """
    return _joined(ranks_of(group), _beside_passes(group, timeout, nccl_ctas))


def _beside_passes(group: dist.ProcessGroup, timeout: timedelta | None, nccl_ctas: int | None) -> _Options:
    """How to make a group for transfers that run concurrently with passes."""
    backend = backend_of(group)
    if not is_nccl(backend):
        return _Options(backend, timeout)
    timeout = timeout or job_timeout() or DEFAULT_TIMEOUT
    return _Options(backend, timeout, partial(options_beside_passes, torchs(group), nccl_ctas, timeout))


def torchs(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group that torch made, where the job has wrapped it, so that it can be destroyed and made again.

    RL frameworks free the memory of communicators during rollouts. They give Megatron, and this package, wrappers that
    stay, whose attribute ``group`` is torch's current group, or None.
    """
    return getattr(group, "group", group)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether torch still has the group."""
    return torchs(group) in distributed_c10d._world.pg_map


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """The ranks within the job, by rank in the group."""
    return dist.get_process_group_ranks(torchs(group))


def backend_of(group: dist.ProcessGroup) -> str:
    """The backend of the messages between stages: where torch has one per type of device, that of GPUs.

    torch names such a group ``cpu:gloo,cuda:nccl``, or ``undefined`` after ``init_process_group()`` without a backend.
    """
    of_devices = BackendConfig(Backend(dist.get_backend(torchs(group)))).get_device_backend_map()
    return str(of_devices.get("cuda") or next(iter(of_devices.values())))


def device_type(backend: str) -> str:
    return "cpu" if backend == "gloo" else "cuda"


def new_group(ranks: Sequence[int], backend: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A new group over ``ranks``, which all of them have joined.

    A collective call: every rank of the job passes the ranks of its own new group. A communicator of NCCL is created in
    the first collective of its group, where the host waits until all ranks take part, and connected in the first one of
    each algorithm. Among the passes, whose order differs between ranks, two hosts could wait for each other there;
    here, all ranks join their groups in one order.
    """
    return _joined(ranks, _Options(backend, timeout))


def _joined(ranks: Sequence[int], options: _Options) -> dist.ProcessGroup:
    (group,) = _made([ranks], options)
    join(group)
    return group


def join(group: dist.ProcessGroup) -> None:
    """Join a group that nobody has joined yet. A collective call of its ranks."""
    group = torchs(group)
    token = torch.zeros(1, device=device_type(backend_of(group)))
    group.allreduce([token]).wait()
    # NCCL connects an algorithm when it is used for the first time (NCCL_RUNTIME_CONNECT), and the host waits for the
    # others again. A sum may take a tree; broadcasts take a ring; a gather may take a tree of its own.
    group.broadcast(token, 0).wait()
    group.allgather([torch.zeros_like(token) for _ in ranks_of(group)], token).wait()
    token.item()  # with NCCL, the waits before were those of the GPU


def _made(wanted: Sequence[Sequence[int]], options: _Options) -> list[Any]:
    """New groups over the ``wanted`` ranks that nobody has joined, for those groups to which this rank belongs.

    A collective call: every rank of the job passes the same number of groups, and the ranks of a group pass it at the
    same place. torch.distributed creates groups collectively, so every rank creates all of them, in the same order:
    those of the first place, then those of the second. This also means that ranks which create a communicator together
    with its group do not wait for each other in a circle. (With ``use_local_synchronization``, a group's name contains
    a counter that may differ between ranks, which hangs.)
    """
    own = [(place, tuple(ranks)) for place, ranks in enumerate(wanted)]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, own)
    timeout, made = options.timeout or job_timeout(), {}
    with _created_lazily():
        for place, ranks in sorted(set(chain.from_iterable(of_all))):
            how = {"timeout": timeout, "backend": options.backend, "pg_options": options.nccl(), "group_desc": _OURS}
            made[place, ranks] = dist.new_group(list(ranks), **how)
    return [made[each] for each in own]


def job_timeout() -> timedelta | None:
    """How long ranks of the job wait for each other: ``init_process_group(timeout=...)``; None if torch does not say.

    Without it, torch gives new groups its own default, whatever the job has asked for.
    """
    if (world := dist.group.WORLD) is None:
        return None
    backend = world._get_backend(torch.device(device_type(backend_of(world))))
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps the backend.
    return getattr(getattr(getattr(backend, "wrapped_pg", backend), "options", None), "_timeout", None)


def cut(why: str | None = None) -> None:
    """Close the connections of all groups over gloo that were made here, with everything that is under way on them.

    Ranks that wait for this one, or will, get an error at once. Groups of NCCL stay as they are: their other ranks
    would not notice.

    Args:
        why: what ``cause_of_cut`` returns on the other ranks, if this rank is the first that failed.
    """
    for group, store in _over_gloo():
        if why is not None:
            with suppress(RuntimeError):
                store.set(_WHY, why)
        # A wait that times out closes all connections of its group, whatever still refers to them.
        with suppress(RuntimeError):
            other = (group.rank() + 1) % group.size()
            group.recv([torch.zeros(1)], other, _CUT_TAG).wait(timedelta(milliseconds=1))


def cause_of_cut() -> str | None:
    """Why another rank has cut a group of this one; None if none has, or if the job's store has gone."""
    with suppress(RuntimeError):
        for _, store in _over_gloo():
            if store.check([_WHY]):
                return store.get(_WHY).decode()
    return None


def _over_gloo() -> Iterator[tuple[dist.ProcessGroup, dist.Store]]:
    """The groups over gloo that were made here, each with its part of the job's store."""
    for group, (_, store) in list(distributed_c10d._world.pg_map.items()):
        if group.group_desc == _OURS and group.size() > 1 and backend_of(group) == "gloo":
            yield group, store


def destroy(*groups: dist.ProcessGroup) -> None:
    """Destroy process groups, unless the job has destroyed them; no message may be in flight.

    Their threads end, and their connections close, with the last reference to them.
    """
    if dist.is_initialized():
        for group in filter(is_alive, groups):
            dist.destroy_process_group(torchs(group))


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

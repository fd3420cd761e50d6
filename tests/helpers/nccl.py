"""GPUs and NCCL, simulated without time in one process, to run the real transport by NCCL's rules.

The rules, as in torch's ``ProcessGroupNCCL``:

* A group has a communicator for its collectives, and one for the sends and receives of each pair of its ranks. Each is
  created lazily: its first transfer blocks the host until all its ranks join. If communicators are eager, a group has
  one for everything, which is created with the group, and blocks the host there.
* A communicator connects an algorithm lazily in any case: the first collective of each blocks the host, too
  (``ncclCollPreconnect``). Sums use a tree, broadcasts a ring, and gathers another tree, as they may between nodes.
* Otherwise, no transfer blocks the host.
* A communicator has one stream per rank, which runs its transfers in the order of issue; but a collective that a host
  issues in a lane runs in the stream of the lane, because no Work is asked for (since torch 2.8).
* A transfer starts after everything that the current stream of its rank contained when it was issued: the compute
  stream, or that of a lane. It ends when all its ranks have it at the front of the communicator's stream.
* ``Work.wait`` makes the current stream wait, and returns at once.

``GPUs`` records what the hosts issue; ``run`` then executes it as far as possible.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch

from megatron.zero_bubble.engine.runtime import groups
from megatron.zero_bubble.engine.runtime.groups import Directions
from megatron.zero_bubble.engine.runtime.transport import Transport
from megatron.zero_bubble.engine.runtime.watchdog import Watchdog

COMPUTE = "compute"
JOIN_TIMEOUT_S = 60.0

T = TypeVar("T")

Stream = tuple[int, Hashable]
"""A rank, and ``COMPUTE`` or a communicator."""


@dataclass
class Event:
    """A CUDA event."""

    reached: bool = False


@dataclass(eq=False)
class _Task:
    """An entry of a stream; it has been dispatched when it has left the hardware queue."""

    stream: Stream
    is_dispatched: bool

    def can_start(self) -> bool:
        return True


@dataclass(eq=False)
class _Kernel(_Task):
    run: Callable[[], object]


@dataclass(eq=False)
class _Record(_Task):
    event: Event


@dataclass(eq=False)
class _Wait(_Task):
    event: Event

    def can_start(self) -> bool:
        return self.event.reached


@dataclass(eq=False)
class _Transfer(_Task):
    """A rank's part of a transfer.

    Attributes:
        ranks: those that take part; of a message, the source comes first.
        move: copies what the tensors of all parts, in the order of ``ranks``, become.
    """

    ranks: tuple[int, ...]
    what: Hashable
    tensor: torch.Tensor
    move: Callable[[list[torch.Tensor]], object]

    def meets(self, other: _Transfer) -> bool:
        return self.is_dispatched and (self.ranks, self.what) == (other.ranks, other.what)


@dataclass
class Work:
    """The handle of a transfer."""

    gpus: GPUs
    rank: int
    done: Event

    def wait(self) -> None:
        self.gpus.wait((self.rank, self.gpus.current), self.done)


@dataclass(eq=False)
class Group:
    """A process group as one of its ranks sees it; ``ranks`` are those of its members, which are numbered within it."""

    gpus: GPUs
    own: int
    ranks: tuple[int, ...]
    name: Hashable

    def rank(self) -> int:
        return self.ranks.index(self.own)

    def send(self, tensors: list[torch.Tensor], peer: int, _tag: int) -> Work:
        return self._message(self.own, self.ranks[peer], *tensors)

    def recv(self, tensors: list[torch.Tensor], peer: int, _tag: int) -> Work:
        return self._message(self.ranks[peer], self.own, *tensors)

    def _message(self, source: int, target: int, tensor: torch.Tensor) -> Work:
        pair = () if self.gpus.eager else (min(source, target), max(source, target))

        def move(tensors: list[torch.Tensor]) -> None:
            tensors[1].copy_(tensors[0])

        return self.gpus.transfer((self.name, *pair), self.own, (source, target), "message", tensor, move)

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        (own,) = tensors

        def move(of_all: list[torch.Tensor]) -> None:
            total = torch.stack(of_all).sum(0)
            for tensor in of_all:
                tensor.copy_(total)

        self._connect("tree")
        return self.gpus.transfer((self.name,), self.own, self.ranks, "sum", own, move)

    def allgather(self, into: list[torch.Tensor], own: torch.Tensor) -> Work:
        def move(of_all: list[torch.Tensor]) -> None:
            for target, tensor in zip(into, of_all, strict=True):
                target.copy_(tensor)

        self._connect("binomial tree")
        return self.gpus.transfer((self.name,), self.own, self.ranks, "gather", own, move)

    def _connect(self, algorithm: str) -> None:
        self.gpus.join((self.name, algorithm), len(self.ranks))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        self._connect("ring")

        def move(of_all: list[torch.Tensor]) -> None:
            for other in of_all:
                other.copy_(of_all[root])

        return self.gpus.transfer((self.name,), self.own, self.ranks, ("broadcast", root), tensor, move)


class Job:
    """The part of ``torch.distributed`` that ``runtime.groups`` uses, for hosts that are threads.

    Args:
        backend: of the pipeline.
    """

    def __init__(self, gpus: GPUs, backend: str) -> None:
        self.group = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=None, _get_backend=lambda _: None))
        self._gpus, self._backend = gpus, backend
        self._host = threading.local()
        self._given: list[Any] = [None] * gpus.num_ranks
        self._all = threading.Barrier(gpus.num_ranks)

    def start(self, rank: int) -> Group:
        """Let this thread be the host of a rank; returns the group of the pipeline."""
        self._host.rank, self._host.num_groups = rank, 0
        return Group(self._gpus, rank, tuple(range(self._gpus.num_ranks)), "pipeline")

    def get_backend(self, _group: Group) -> str:
        return self._backend

    def get_process_group_ranks(self, group: Group) -> list[int]:
        return list(group.ranks)

    def get_group_rank(self, group: Group, rank: int) -> int:
        return group.ranks.index(rank)

    def get_world_size(self) -> int:
        return self._gpus.num_ranks

    def all_gather_object(self, into: list[Any], own: Any) -> None:
        self._given[self._host.rank] = own
        self._all.wait(JOIN_TIMEOUT_S)
        into[:] = self._given
        self._all.wait(JOIN_TIMEOUT_S)

    def new_group(self, ranks: list[int], **_options: Any) -> Group | None:
        self._host.num_groups += 1
        if self._host.rank not in ranks:
            return None
        group = Group(self._gpus, self._host.rank, tuple(sorted(ranks)), self._host.num_groups)
        if self._gpus.eager:
            self._gpus.join((group.name,), len(ranks))
        return group


@dataclass
class GPUs:
    """One GPU per rank.

    Attributes:
        eager: whether communicators are created eagerly, one per group.
        num_queues: the number of hardware queues of each GPU (CUDA_DEVICE_MAX_CONNECTIONS), which streams share in
            turn; None if every stream has one. What waits at the front of a queue holds back what the rank issued
            later in the same queue.
        backend: the name of the pipeline's backend; with ``gloo``, all messages of a direction share a group.
    """

    num_ranks: int
    eager: bool = False
    num_queues: int | None = None
    backend: str = "nccl"
    streams: defaultdict[Stream, deque[_Task]] = field(default_factory=lambda: defaultdict(deque))
    communicators: dict[Hashable, threading.Barrier] = field(default_factory=dict)
    _joined: Counter[Hashable] = field(default_factory=Counter)
    _queues: defaultdict[tuple[int, int], deque[_Task]] = field(default_factory=lambda: defaultdict(deque))
    _queue_of: dict[Stream, tuple[int, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _current: threading.local = field(default_factory=threading.local)

    def on_hosts(self, run: Callable[[Group], T]) -> list[T]:
        """Run ``run(pipeline)`` on a host per rank, concurrently, because they may wait for each other."""
        job = Job(self, self.backend)
        with (
            mock.patch.object(groups, "dist", job),
            mock.patch.object(groups, "device_type", return_value="cpu"),
            mock.patch.object(groups, "options_beside_passes", return_value=None),
            ThreadPoolExecutor(self.num_ranks) as hosts,
        ):
            return list(hosts.map(lambda rank: run(job.start(rank)), range(self.num_ranks)))

    def transports(
        self, channels: frozenset[tuple[int, int]], watchdogs: Sequence[Watchdog] | None = None
    ) -> list[Transport]:
        """A transport for every rank."""

        def transport(pipeline: Any) -> Transport:
            watchdog = None if watchdogs is None else watchdogs[pipeline.rank()]
            return Transport(Directions.of(pipeline), channels, watchdog)

        return self.on_hosts(transport)

    @property
    def current(self) -> Hashable:
        """The stream in which the host of this thread issues, of its GPU."""
        return getattr(self._current, "stream", COMPUTE)

    @contextmanager
    def stream(self, name: Hashable) -> Iterator[None]:
        """Context in which the host of this thread issues in the stream ``name``."""
        before, self._current.stream = self.current, name
        yield
        self._current.stream = before

    def compute(self, rank: int, run: Callable[[], object]) -> None:
        """Issue a kernel on the current stream, which is the compute stream outside of lanes."""
        self._issue(_Kernel((rank, self.current), not self._share, run))

    def record(self, stream: Stream) -> Event:
        event = Event()
        # The end of a kernel sets an event, so that an event that is recorded holds back nothing.
        self._issue(_Record(stream, True, event), in_queue=False)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._issue(_Wait(stream, not self._share, event))

    def transfer(
        self,
        communicator: Hashable,
        rank: int,
        ranks: tuple[int, ...],
        what: Hashable,
        tensor: torch.Tensor,
        move: Callable[[list[torch.Tensor]], object],
    ) -> Work:
        """Issue the part of ``rank``; see ``_Transfer``."""
        self.join(communicator, len(ranks))
        in_lane = what != "message" and self.current != COMPUTE
        stream = (rank, self.current if in_lane else communicator)
        self.wait(stream, self.record((rank, self.current)))
        self._issue(_Transfer(stream, not self._share, ranks, what, tensor, move))
        return Work(self, rank, self.record(stream))

    def join(self, communicator: Hashable, num_ranks: int) -> None:
        """Block the host until all ranks of a communicator have joined it."""
        with self._lock:
            barrier = self.communicators.setdefault(communicator, threading.Barrier(num_ranks))
            if self._joined[communicator] == barrier.parties:
                return
            self._joined[communicator] += 1
        barrier.wait(JOIN_TIMEOUT_S)

    def _issue(self, task: _Task, in_queue: bool = True) -> None:
        with self._lock:
            self.streams[task.stream].append(task)
            if self._share and in_queue:
                self._queues[self._queue(task.stream)].append(task)

    @property
    def _share(self) -> bool:
        return self.num_queues is not None

    def _queue(self, stream: Stream) -> tuple[int, int]:
        """The hardware queue of a stream, which it gets at its first use."""
        rank, count = stream[0], self.num_queues or 1
        number = sum(owner == rank for owner, _ in self._queue_of) % count
        return self._queue_of.setdefault(stream, (rank, number))

    def run(self) -> bool:
        """Execute everything that was issued; False if some of it waits forever, which then stays in ``streams``."""
        proceeds = True
        while proceeds:
            proceeds = sum(map(self._dispatch, self._queues.values())) > 0
            for stream in list(self.streams.values()):
                while stream and self._step(stream):
                    proceeds = True
        return not any(self.streams.values())

    def _dispatch(self, queue: deque[_Task]) -> bool:
        """Let the tasks at the front of a hardware queue start."""
        any_started = False
        while queue and self.streams[queue[0].stream][0] is queue[0] and queue[0].can_start():
            queue.popleft().is_dispatched = any_started = True
        return any_started

    def _step(self, stream: deque[_Task]) -> bool:
        """Complete the first task of ``stream`` if that is possible."""
        task = stream[0]
        if not task.is_dispatched or not task.can_start():
            return False
        if isinstance(task, _Transfer):
            ends = [self.streams[rank, task.stream[1]] for rank in task.ranks]
            parts = [end[0] for end in ends if end]
            if len(parts) < len(ends) or not all(isinstance(part, _Transfer) and part.meets(task) for part in parts):
                return False
            task.move([part.tensor for part in parts if isinstance(part, _Transfer)])
            for end in ends:
                end.popleft()
            return True
        if isinstance(task, _Kernel):
            task.run()
        elif isinstance(task, _Record):
            task.event.reached = True
        stream.popleft()
        return True


@dataclass
class Marks:
    """Marks in the compute stream of one rank, for its watchdog."""

    gpus: GPUs
    rank: int

    def mark(self) -> Event:
        return self.gpus.record((self.rank, COMPUTE))

    def reached(self, mark: Event) -> bool:
        return mark.reached

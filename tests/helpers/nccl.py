"""GPUs and NCCL, simulated without time in one process, to run the real transport by NCCL's rules.

The rules, as in torch's ``ProcessGroupNCCL``:

* Neither a send nor a receive blocks the host, except the first one of a communicator that is created lazily: it waits
  until the other rank joins.
* A communicator has one stream per rank, which runs its transfers in the order of issue.
* A transfer starts after everything that its rank's compute stream contained when it was issued. It ends when its other
  end is at the front of the same communicator's stream on the other rank.
* ``Work.wait`` makes the compute stream wait, and returns at once.

``GPUs`` records what the hosts issue; ``run`` then executes it as far as possible.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from megatron.zero_bubble.runtime.groups import Directions
from megatron.zero_bubble.runtime.transport import Transport
from megatron.zero_bubble.runtime.watchdog import Watchdog

COMPUTE = "compute"
JOIN_TIMEOUT_S = 5.0

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
    peer: int
    sends: bool
    tensor: torch.Tensor


@dataclass
class Work:
    """The handle of a transfer."""

    gpus: GPUs
    rank: int
    done: Event

    def wait(self) -> None:
        self.gpus.wait((self.rank, COMPUTE), self.done)


@dataclass
class Group:
    """A process group as one of its ranks sees it."""

    gpus: GPUs
    rank: int
    name: str

    def send(self, tensors: list[torch.Tensor], peer: int, _tag: int) -> Work:
        return self.gpus.transfer(self.name, self.rank, peer, True, *tensors)

    def recv(self, tensors: list[torch.Tensor], peer: int, _tag: int) -> Work:
        return self.gpus.transfer(self.name, self.rank, peer, False, *tensors)


@dataclass
class GPUs:
    """One GPU per rank.

    Attributes:
        eager: whether communicators are created eagerly, one per group; by default one per pair of ranks and group.
        one_queue: whether each GPU has a single hardware queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1: what waits at
            its front holds back everything that the rank issued later.
    """

    num_ranks: int
    eager: bool = False
    one_queue: bool = False
    streams: defaultdict[Stream, deque[_Task]] = field(default_factory=lambda: defaultdict(deque))
    communicators: dict[Hashable, threading.Barrier] = field(default_factory=dict)
    _queues: defaultdict[int, deque[_Task]] = field(default_factory=lambda: defaultdict(deque))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def transports(
        self, channels: frozenset[tuple[int, int]], watchdogs: Sequence[Watchdog] | None = None
    ) -> list[Transport]:
        """A transport for every rank; the hosts run concurrently, because the first transfers wait for each other."""

        def transport(rank: int) -> Transport:
            return Transport(self._directions(rank), channels, None if watchdogs is None else watchdogs[rank])

        with ThreadPoolExecutor(self.num_ranks) as hosts:
            return list(hosts.map(transport, range(self.num_ranks)))

    def _directions(self, rank: int) -> Directions:
        groups = {ascending: Group(self, rank, "up" if ascending else "down") for ascending in (True, False)}
        return Directions(rank, range(self.num_ranks), "nccl", "cpu", groups)  # type: ignore[arg-type]

    def compute(self, rank: int, run: Callable[[], object]) -> None:
        """Issue a kernel on the compute stream."""
        self._issue(_Kernel((rank, COMPUTE), not self.one_queue, run))

    def record(self, stream: Stream) -> Event:
        event = Event()
        # The end of a kernel sets an event, so that an event that is recorded holds back nothing.
        self._issue(_Record(stream, True, event), in_queue=False)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._issue(_Wait(stream, not self.one_queue, event))

    def transfer(self, group: str, rank: int, peer: int, sends: bool, tensor: torch.Tensor) -> Work:
        communicator = group if self.eager else (group, *sorted((rank, peer)))
        if not self.eager:
            self._join(communicator)
        stream = (rank, communicator)
        self.wait(stream, self.record((rank, COMPUTE)))
        self._issue(_Transfer(stream, not self.one_queue, peer, sends, tensor))
        return Work(self, rank, self.record(stream))

    def _join(self, communicator: Hashable) -> None:
        with self._lock:
            is_new = communicator not in self.communicators
            barrier = self.communicators.setdefault(communicator, threading.Barrier(2))
            if not is_new and barrier.n_waiting == 0:
                return
        barrier.wait(JOIN_TIMEOUT_S)

    def _issue(self, task: _Task, in_queue: bool = True) -> None:
        with self._lock:
            self.streams[task.stream].append(task)
            if self.one_queue and in_queue:
                self._queues[task.stream[0]].append(task)

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
            rank, communicator = task.stream
            others = self.streams[task.peer, communicator]
            other = others[0] if others else None
            if not isinstance(other, _Transfer) or not other.is_dispatched:
                return False
            if (other.peer, other.sends) != (rank, not task.sends):
                return False
            source, target = (task, other) if task.sends else (other, task)
            target.tensor.copy_(source.tensor)
            others.popleft()
        elif isinstance(task, _Kernel):
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

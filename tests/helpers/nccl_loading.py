"""Hosts that stop until their GPU is idle, on the simulated GPUs of ``nccl``.

CUDA loads a kernel when it is launched for the first time, which "may require context synchronization" (CUDA's
programming guide on lazy loading): the host waits until everything that was launched before has ended. So does
cudaFree. A receive of NCCL is a kernel that spins until its message arrives. A host that stops behind it issues
nothing, and the message may depend on what it does not issue.

The rules in addition to those of ``nccl``:

* The hosts run concurrently.
* Before the first launch of a kernel on a GPU, its host stops until every stream of the GPU is empty.
* A collective starts on a rank after everything that its compute stream contained when it was issued. It ends on all
  ranks when it is at the front of its stream on each of them.
* With gloo, what the ranks exchange is in host memory. A host waits for its GPU before it sends, and for the message
  before it issues what uses it, so that nothing on a GPU waits for another rank.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from megatron.zero_bubble.core.ir import Kind, Op, Pass, Plan, Value
from megatron.zero_bubble.core.ir.shards import Close, Gather, Open, Reduce, ReleaseWeights, Wait
from megatron.zero_bubble.engine.runtime.collectives import Transfer, collective_handlers
from megatron.zero_bubble.engine.runtime.executor import Executor
from megatron.zero_bubble.engine.runtime.handler import Awaited, Handler
from megatron.zero_bubble.engine.runtime.handlers import handlers
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers.nccl import COMPUTE, Event, GPUs, Stream, _Task

Kernels = Callable[[Any], Hashable]
"""Names the kernels of a pass, or of another step, which is a text. The first launch of a name on a GPU loads it; what
is None has been launched before."""


def by_kind(step: Pass | str) -> Hashable:
    """All stages of a rank have the same kernels."""
    return step.kind if isinstance(step, Pass) else step


def by_stage(step: Pass | str) -> Hashable:
    """The stages of a rank have different kernels."""
    return (step.kind, step.stage) if isinstance(step, Pass) else step


def always_new(step: Pass | str) -> Hashable:
    """Every launch is the first of its kernel: the worst case of all choices of kernels that are loaded already."""
    return object()


class Stuck(Exception):
    """All hosts wait forever."""


class Hosts:
    """Hosts of which one runs at a time, until it waits or ends. As no host takes anything from another, the order in
    which they run does not matter.
    """

    def __init__(self, num_hosts: int) -> None:
        self._running, self._waiting = num_hosts, 0
        self._turn = threading.Condition()
        self._stuck = False

    def run(self, hosts: Sequence[Callable[[], None]]) -> bool:
        """Run all hosts; False if those that have not ended wait forever."""

        def run(host: Callable[[], None]) -> None:
            with self._turn:
                try:
                    host()
                except Stuck:
                    pass
                finally:
                    self._running -= 1
                    self._let_others_look()

        with ThreadPoolExecutor(len(hosts)) as threads:
            list(threads.map(run, hosts))
        return not self._stuck

    def wait(self, until: Callable[[], bool]) -> None:
        """Let a host wait; raises ``Stuck`` if the other hosts cannot change the answer."""
        if until():
            return
        self._let_others_look()
        while not until():
            self._waiting += 1
            if self._waiting == self._running:
                self._stuck = True
                self._turn.notify_all()
            else:
                self._turn.wait()
            if self._stuck:
                raise Stuck

    def _let_others_look(self) -> None:
        """Every host that waits looks again before all of them count as waiting."""
        self._waiting = 0
        if self._running and not self._stuck:
            self._turn.notify_all()


@dataclass(eq=False)
class _Collective(_Task):
    members: Sequence[tuple[LoadingGPUs, int]]

    def others(self) -> list[deque[_Task]]:
        return [gpus.streams[rank, self.stream[1]] for gpus, rank in self.members]


@dataclass
class LoadingGPUs(GPUs):
    """The GPUs of one pipeline, whose hosts stop before they load a kernel.

    Attributes:
        hosts: those of all pipelines.
        kernels: which kernels there are.
        waits_for_passes: whether a host that stops waits for the compute stream only, as where torch's allocator
            shrinks an expandable segment.
        replicas: the GPUs of all pipelines.
    """

    hosts: Hosts = field(default_factory=lambda: Hosts(0))
    kernels: Kernels = always_new
    waits_for_passes: bool = False
    replicas: Sequence[LoadingGPUs] = ()
    _loaded: set[tuple[int, Hashable, bool]] = field(default_factory=set)
    _sent: defaultdict[Stream, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    _posted: defaultdict[Stream, int] = field(default_factory=lambda: defaultdict(int))
    _started: defaultdict[tuple[str, int], list[Event]] = field(default_factory=lambda: defaultdict(list))

    def launch(self, rank: int, step: Pass | str, forward_only: bool = False) -> None:
        """Launch the kernel of a step, which stops the host if it is new."""
        name = self.kernels(step)
        if name is not None and (rank, name, forward_only) not in self._loaded:
            self.hosts.wait(lambda: self.is_idle(rank))
            self._loaded.add((rank, name, forward_only))
        self.compute(rank, lambda: None)

    def is_idle(self, rank: int) -> bool:
        self.run_all()
        names = [COMPUTE] if self.waits_for_passes else [name for owner, name in self.streams if owner == rank]
        return not any(self.streams[rank, name] for name in names)

    def reached(self, event: Event) -> bool:
        self.run_all()
        return event.reached

    def run_all(self) -> bool:
        """Run the GPUs of all replicas as far as possible; False if some of it waits."""
        of_pipelines = [gpus.streams for gpus in self.replicas]
        left = -1
        while left != (left := sum(len(stream) for streams in of_pipelines for stream in streams.values())):
            for gpus in self.replicas:
                gpus.run()
        return left == 0

    def collective(self, name: str, rank: int, members: Sequence[tuple[LoadingGPUs, int]]) -> Event:
        """Issue a collective of NCCL between ``members``, which all issue those of a name in one order."""
        stream = (rank, name)
        self.wait(stream, self.record((rank, COMPUTE)))
        self._issue(_Collective(stream, not self._share, members))
        return self.record(stream)

    def _step(self, stream: deque[_Task]) -> bool:
        task = stream[0]
        if not isinstance(task, _Collective):
            return super()._step(stream)
        others = task.others()
        fronts = [other[0] if other else None for other in others]
        if not all(isinstance(front, _Collective) and front.is_dispatched for front in fronts):
            return False
        for other in others:
            other.popleft()
        return True

    def staged(self, usual: Transport) -> Transport:
        """A transport for the rank of ``usual`` whose messages go through host memory."""
        groups: Any = {ascending: _Staged(self, usual.rank, ascending) for ascending in (True, False)}
        return Transport(replace(usual._directions, backend="gloo", groups=groups), ())


@dataclass
class _Staged:
    """A group of gloo, as one of its ranks uses it with tensors in GPU memory."""

    gpus: LoadingGPUs
    rank: int
    name: Hashable

    def send(self, tensors: list[torch.Tensor], peer: int, _tag: int) -> _HostWork:
        gpus, channel = self.gpus, (self.rank, (self.name, peer))
        ready = gpus.record((self.rank, COMPUTE))
        gpus.hosts.wait(lambda: gpus.reached(ready))
        gpus._sent[channel].append(tensors[0])
        number = len(gpus._sent[channel])
        return _HostWork(gpus.hosts, lambda: gpus._posted[channel] >= number)

    def recv(self, tensors: list[torch.Tensor], peer: int, _tag: int) -> _HostWork:
        gpus, channel = self.gpus, (peer, (self.name, self.rank))
        gpus._posted[channel] += 1
        number = gpus._posted[channel]
        return _HostWork(gpus.hosts, lambda: len(gpus._sent[channel]) >= number)


@dataclass
class _HostWork(Awaited):
    """Something for which a host waits."""

    hosts: Hosts
    done: Callable[[], bool]
    value: Any = None

    def wait(self, _needed_by: object = None) -> Any:
        self.hosts.wait(self.done)
        return self.value


@dataclass
class _StreamWork(Awaited):
    """Something for which the compute stream of a GPU waits."""

    gpus: LoadingGPUs
    rank: int
    done: Event
    value: Any = None

    def wait(self, _needed_by: object) -> Any:
        self.gpus.wait((self.rank, COMPUTE), self.done)
        return self.value


@dataclass
class _Lanes:
    """``runtime.collectives.Lanes`` of one rank: streams with NCCL, threads with gloo."""

    gpus: LoadingGPUs
    rank: int
    staged: bool

    def start(self, op: Any, transfer: Transfer) -> Awaited:
        gpus = self.gpus
        if not self.staged:
            event = gpus.collective(op.lane, self.rank, [(gpus, rank) for rank in range(gpus.num_ranks)])
            return _StreamWork(gpus, self.rank, event, transfer.result())
        starts = [gpus._started[op.lane, rank] for rank in range(gpus.num_ranks)]
        number = len(starts[self.rank])
        starts[self.rank].append(gpus.record((self.rank, COMPUTE)))

        def done() -> bool:
            return all(len(events) > number and gpus.reached(events[number]) for events in starts)

        return _HostWork(gpus.hosts, done, transfer.result())


class _Tensors:
    """The collectives of a model's values, without values."""

    def spread(self, _value: Value, held: Any, _root: int) -> Transfer:
        return Transfer(lambda _group: None, (), lambda: held)

    def gather(self, _kind: Kind, _microbatch: int, part: Any) -> tuple[Transfer, Any]:
        return Transfer(lambda _group: None), part

    def total(self, _kind: Kind, _microbatch: int, _part: Any, _root: int, _is_root: bool) -> Transfer:
        return Transfer(lambda _group: None)


@dataclass
class _Stage:
    """The stages of a rank; a pass is one kernel."""

    gpus: LoadingGPUs
    turn: Turn
    rank: int

    def run(self, work: Pass, _inputs: Sequence[Any]) -> list[torch.Tensor]:
        self.gpus.launch(self.rank, work, self.turn.forward_only)
        return [torch.zeros(()) for _ in self.turn.plan.schedule.flow.outputs(work)]


def _shard_handlers(gpus: LoadingGPUs, rank: int) -> dict[type[Op], Handler]:
    """The handlers of sharded units: gathers and reductions of the replicas are on one lane."""

    def start(op: Op, _inputs: Sequence[Any]) -> Sequence[Any]:
        gpus.launch(rank, type(op).__name__)
        members = [(replica, rank) for replica in gpus.replicas]
        return (_StreamWork(gpus, rank, gpus.collective("data", rank, members)),)

    def change(op: Op, inputs: Sequence[Any]) -> Sequence[Any]:
        gpus.launch(rank, type(op).__name__)
        return (None,) if isinstance(op, Open) else inputs

    return {Gather: start, Reduce: start, Wait: change, ReleaseWeights: change, Open: change, Close: change}


@dataclass
class Turn:
    """One iteration.

    Attributes:
        staged: whether messages and the collectives of the pipeline go through host memory.
        rejected: whether the plan finds that the last optimizer step was wrong, so that it runs again.
    """

    plan: Plan
    forward_only: bool = False
    staged: bool = False
    rejected: bool = False


def all_end(turns: Sequence[Turn], kernels: Kernels, num_replicas: int = 1, waits_for_passes: bool = False) -> bool:
    """Whether iterations end, one after the other, on GPUs on which no kernel is loaded; their hosts run ahead.

    Args:
        num_replicas: pipelines that run the plans; they take part together in the collectives of sharded units.
        waits_for_passes: see ``LoadingGPUs``.
    """
    num_ranks = turns[0].plan.schedule.num_ranks
    channels = frozenset[tuple[int, int]]().union(*(turn.plan.channels for turn in turns))
    hosts = Hosts(num_replicas * num_ranks)
    replicas = [LoadingGPUs(num_ranks, hosts=hosts, kernels=kernels) for _ in range(num_replicas)]

    def host(gpus: LoadingGPUs, transport: Transport) -> None:
        staged = gpus.staged(transport)
        for turn in turns:
            _run(gpus, turn, staged if turn.staged else transport)

    started = []
    for gpus in replicas:
        gpus.replicas = replicas
        gpus.waits_for_passes = waits_for_passes
        started += [partial(host, gpus, transport) for transport in gpus.transports(channels)]
        assert gpus.run(), "the channels must open"
    return hosts.run(started) and replicas[0].run_all()


def _run(gpus: LoadingGPUs, turn: Turn, transport: Transport) -> None:
    """Run one iteration of one rank."""
    rank, plan, answers = transport.rank, turn.plan, [not turn.rejected, True]
    stages = dict.fromkeys(range(plan.schedule.num_stages), _Stage(gpus, turn, rank))
    by_op = handlers(stages, transport, lambda _message: torch.zeros(()), validate=lambda: answers.pop(0))
    lanes: Any = _Lanes(gpus, rank, turn.staged)
    by_op.update(collective_handlers(plan, lanes, _Tensors()))
    by_op.update(_shard_handlers(gpus, rank))
    if not Executor(plan, rank, by_op).run():
        gpus.launch(rank, "undo")
        assert Executor(plan, rank, by_op).run()
    assert transport.num_in_flight == 0
    if not turn.forward_only:
        gpus.launch(rank, "step")

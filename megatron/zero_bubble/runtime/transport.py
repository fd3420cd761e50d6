"""Point-to-point transport between the ranks of one pipeline: NCCL, gloo, or gloo with tensors staged in host memory.

Constraints of the backends:

* A gloo send of any size completes only after the peer has posted its receive, and the message is lost if the send's
  handle is released. Therefore sends do not wait, and handle and buffer are kept until ``settle``.
* NCCL runs the operations of a communicator in the order in which they were issued. Therefore each direction has a
  separate group, whose communicators are created lazily: a communicator of two ranks then carries a single channel,
  whose order is proved to be the same on both ends. One that is created eagerly, as after
  ``init_process_group(device_id=...)``, holds all ranks of its group, and plans can deadlock (``Queues.DIRECTION``).
* The first operation of a NCCL communicator blocks until its peer joins. Therefore every channel is opened once, in a
  global order, before the first pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.errors import PeerError
from megatron.zero_bubble.ir import Message
from megatron.zero_bubble.runtime.executor import Awaited

# Phrases in errors of gloo, NCCL and their store that mean a lost or silent peer.
_LOST = re.compile("closed by peer|reset by peer|broken pipe|refused|remote process|timed? ?out", re.IGNORECASE)
# gloo's messages start with a location in its source and end with advice.
_ONLY_THE_REASON = re.compile(r"^(?:\[[^]]*\.cc:\d+\] )?(.*?)(?:\. This is typically|\.?$)")


def lost_connection(error: BaseException) -> str | None:
    """The reason, as one phrase, if torch.distributed's ``error`` means a lost or silent rank; None otherwise."""
    text = str(error)
    return _reason(error) if isinstance(error, RuntimeError) and _LOST.search(text) else None


class Receive(Awaited):
    """A posted receive; ``wait`` returns the tensor on the compute device."""

    def __init__(self, work: dist.Work, buffer: torch.Tensor, staged: torch.Tensor | None, message: Message) -> None:
        self._work = work
        self._buffer = buffer
        self._staged = staged
        self._message = message

    def wait(self, needed_by: object) -> torch.Tensor:
        """Block the compute stream (CUDA) or the caller (CPU) until the message has arrived.

        Raises:
            PeerError: the sender died or did not send within the group's timeout.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _not_received(self._message, f"run {needed_by}", error) from error
        if self._staged is not None:
            self._buffer.copy_(self._staged)
        return self._buffer


class Transport:
    """The channels of one pipeline. The constructor is a collective call of all ranks of all pipelines of the job.

    Args:
        group: the pipeline-parallel process group; its ranks are the ranks of the plan.
        channels: the (source, target) pairs that the plan uses.
        timeout: maximum time that an operation waits for its peer; None is the default of torch.distributed.
    """

    def __init__(
        self, group: dist.ProcessGroup, channels: Iterable[tuple[int, int]], timeout: timedelta | None = None
    ) -> None:
        self.rank = group.rank()
        self._backend = dist.get_backend(group)
        global_ranks = dist.get_process_group_ranks(group)
        self._groups = _directions(global_ranks, self._backend, timeout)
        # torch.distributed sorts the ranks of a new group.
        self._peers = [dist.get_group_rank(self._groups[True], rank) for rank in global_ranks]
        self._in_flight: dict[Message, tuple[dist.Work, torch.Tensor]] = {}
        self._opened: set[tuple[int, int]] = set()
        self.open(channels)

    def open(self, channels: Iterable[tuple[int, int]]) -> None:
        """Connect new channels; every rank of the pipeline must call this with the same channels."""
        device = "cpu" if self._backend == "gloo" else "cuda"
        for source, target in sorted(set(channels) - self._opened):
            token = torch.zeros(1, device=device)
            if self.rank == source:
                dist.send(token, group=self._group(source, target), group_dst=self._peers[target])
            elif self.rank == target:
                dist.recv(token, group=self._group(source, target), group_src=self._peers[source])
            self._opened.add((source, target))

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return self._groups[source < target]

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Start sending ``tensor`` (contiguous, any dtype); never waits for the peer.

        Raises:
            PeerError: the receiver is known to be gone.
        """
        tensor = tensor.contiguous()
        if self._stages(tensor):
            tensor = tensor.cpu()
        try:
            # dist.isend ends in this call; its Python layers take longer than the rest of a send. Same for receives.
            work = self._group(*message.channel).send([tensor], self._peers[message.target], 0)
        except RuntimeError as error:
            raise _not_sent(message, error) from error
        self._in_flight[message] = (work, tensor)

    def post(self, message: Message, buffer: torch.Tensor) -> Receive:
        """Post a receive into ``buffer``, which must have the shape and dtype of the sent tensor.

        Raises:
            PeerError: the sender is known to be gone.
        """
        staged = torch.empty_like(buffer, device="cpu") if self._stages(buffer) else None
        target = buffer if staged is None else staged
        try:
            work = self._group(*message.channel).recv([target], self._peers[message.source], 0)
        except RuntimeError as error:
            raise _not_received(message, "continue", error) from error
        return Receive(work, buffer, staged, message)

    def settle(self, message: Message) -> None:
        """Wait until the send of ``message`` is complete, then release its buffer.

        Raises:
            PeerError: the receiver died or did not receive the message within the group's timeout.
        """
        work, _ = self._in_flight.pop(message)
        try:
            work.wait()
        except RuntimeError as error:
            raise _not_sent(message, error) from error

    def _stages(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is staged in host memory: gloo, used when ranks share a GPU, sends only host memory."""
        return self._backend == "gloo" and tensor.device.type != "cpu"

    def close(self) -> None:
        """Destroy the process groups; no message may be in flight."""
        if dist.is_initialized():
            for group in self._groups.values():
                dist.destroy_process_group(group)
        self._groups.clear()

    @property
    def num_in_flight(self) -> int:
        """Number of sends not yet settled; 0 between iterations."""
        return len(self._in_flight)


def _directions(ranks: list[int], backend: str, timeout: timedelta | None) -> dict[bool, dist.ProcessGroup]:
    """Two new groups over ``ranks``: one for messages to higher ranks (True), one for messages to lower ranks."""
    return {ascending: new_group(ranks, backend, timeout) for ascending in (True, False)}


def new_group(ranks: Iterable[int], backend: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A new group over ``ranks``. A collective call: every rank of the job passes the ranks of its own new group.

    torch.distributed creates groups collectively, so every rank creates all of them, in the same order. (With
    ``use_local_synchronization``, a group's name contains a counter that may differ between ranks, which hangs.)
    """
    own = tuple(ranks)
    wanted: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(wanted, own)
    with _created_lazily():
        made = {of: dist.new_group(list(of), timeout=timeout, backend=backend) for of in sorted(set(wanted))}
    return made[own]


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


def _not_received(message: Message, purpose: str, error: RuntimeError) -> PeerError:
    m = message
    return PeerError(
        f"pipeline rank {m.target} could not {purpose}: the output of {m.value} did not arrive from pipeline rank "
        f"{m.source} on channel {m.source}>{m.target} ({_reason(error)}); rank {m.source} has died or hangs: look at "
        "its output first"
    )


def _not_sent(message: Message, error: RuntimeError) -> PeerError:
    m = message
    return PeerError(
        f"pipeline rank {m.source} could not deliver the output of {m.value} to pipeline rank {m.target} on channel "
        f"{m.source}>{m.target} ({_reason(error)}); rank {m.target} has died or hangs: look at its output first"
    )


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    match = _ONLY_THE_REASON.match(lines[0]) if lines else None
    return match.group(1) if match else type(error).__name__

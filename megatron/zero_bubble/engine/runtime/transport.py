"""Point-to-point transport between the ranks of one pipeline: NCCL, gloo, or gloo with tensors staged in host memory.

Constraints of the backends:

* A gloo send of any size completes only after the peer has posted its receive, and the message is lost if the send's
  handle is released. Therefore sends do not wait, and handle and buffer are kept until ``settle``.
* NCCL runs the operations of a communicator in the order in which they were issued. Therefore each channel has a
  communicator of its own (``groups.Directions``), whose order is proved to be the same on both ends.
* The first operation of a NCCL communicator blocks until its peer joins. Therefore every channel is opened once, in a
  global order, before the first pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import PeerError
from megatron.zero_bubble.core.ir import Message
from megatron.zero_bubble.core.ir.ops import Channel
from megatron.zero_bubble.engine.runtime.backends import is_nccl
from megatron.zero_bubble.engine.runtime.groups import Directions, torchs
from megatron.zero_bubble.engine.runtime.handler import Awaited
from megatron.zero_bubble.engine.runtime.nccl import check_streams, without_p2p_warning
from megatron.zero_bubble.engine.runtime.watchdog import Watchdog

# Phrases in errors of gloo, NCCL and their store that mean a silent peer, and a lost or silent one.
_SILENT = re.compile("timed? ?out", re.IGNORECASE)
_LOST = re.compile(f"closed by peer|reset by peer|broken pipe|refused|remote process|{_SILENT.pattern}", re.IGNORECASE)
# gloo's messages start with a location in its source and end with advice.
_ONLY_THE_REASON = re.compile(r"^(?:\[[^]]*\.cc:\d+\] )?(.*?)(?:\. This is typically|\.?$)")


def lost_connection(error: BaseException) -> str | None:
    """The reason, as one phrase, if torch.distributed's ``error`` means a lost or silent rank; None otherwise."""
    text = str(error)
    return reason_of(error) if isinstance(error, RuntimeError) and _LOST.search(text) else None


@contextmanager
def blaming_peers(lost: Callable[[str], PeerError]) -> Iterator[None]:
    """Context that turns a lost connection into the error that ``lost`` makes of its reason."""
    try:
        yield
    except RuntimeError as error:
        if (reason := lost_connection(error)) is None:
            raise
        raise lost(reason) from error


def is_silent(error: PeerError) -> bool:
    """Whether a peer took too long; otherwise it has gone. torch.distributed has one class of errors for both."""
    return _SILENT.search(str(error.__cause__)) is not None


class Receive(Awaited):
    """A posted receive; ``wait`` returns the tensor on the compute device."""

    def __init__(
        self,
        work: dist.Work,
        buffer: torch.Tensor,
        staged: torch.Tensor | None,
        message: Message,
        watchdog: Watchdog | None,
    ) -> None:
        self._work = work
        self._buffer = buffer
        self._staged = staged
        self._message = message
        self._watchdog = watchdog

    def wait(self, needed_by: object) -> torch.Tensor:
        """Block the compute stream (NCCL) or the caller (gloo) until the message has arrived.

        Raises:
            PeerError: the sender died or did not send within the group's timeout. With NCCL, the watchdog ends the
                process with the same message instead.
        """
        message = self._message  # the watchdog must not keep the buffer
        _wait(self._work, self._watchdog, lambda reason: not_received(message, f"run {needed_by}", reason))
        if self._staged is not None:
            self._buffer.copy_(self._staged)
        return self._buffer


class Transport:
    """The channels of one pipeline.

    Args:
        directions: the process groups for the messages, which ``close`` destroys.
        channels: the (source, target) pairs that the plan uses; see ``open``.
        watchdog: with NCCL, follows the waits of the GPU; ``close`` stops it.
    """

    def __init__(self, directions: Directions, channels: Iterable[Channel], watchdog: Watchdog | None = None) -> None:
        self._directions, self._watchdog = directions, watchdog
        self.rank = directions.rank
        self._is_gloo = directions.backend == "gloo"
        self._in_flight: dict[Message, tuple[dist.Work, torch.Tensor]] = {}
        self._opened: set[Channel] = set()
        self._routes: dict[Channel, tuple[dist.ProcessGroup, int]] = {}
        self.open(channels)

    def open(self, channels: Iterable[Channel]) -> None:
        """Connect new channels, each together with its way back, which the plans of other iterations use.

        Every rank of the pipeline must call this with the same channels; with NCCL, all ranks of the job, for the first
        plan of a placement.
        """
        missing = sorted({way for channel in channels for way in (channel, channel[::-1])} - self._opened, key=_round)
        self._directions.open(missing)
        self._connect(missing)

    def reopen(self) -> None:
        """Connect all channels again, because the job has made the groups within their wrappers again.

        Every rank of the pipeline must call this.
        """
        channels, self._opened = sorted(self._opened, key=_round), set()
        self._routes.clear()
        self._connect(channels)

    @property
    def channels(self) -> list[Channel]:
        """The open channels of the pipeline, in one order on all ranks."""
        return sorted(self._opened)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return tuple(self._directions.groups.values())

    def _connect(self, channels: Iterable[Channel]) -> None:
        if is_nccl(self._directions.backend):
            without_p2p_warning(lambda: self._exchange_tokens(channels))
        else:
            self._exchange_tokens(channels)

    def _exchange_tokens(self, channels: Iterable[Channel]) -> None:
        for channel in channels:
            self._opened.add(channel)
            if self.rank in channel:
                group, peer = self.route(channel)
                transfer = group.send if self.rank == channel[0] else group.recv
                transfer([torch.zeros(1, device=self._directions.device)], peer, 0).wait()

    def route(self, channel: Channel) -> tuple[dist.ProcessGroup, int]:
        """The group for the messages of an open channel of this rank, and the rank in it of the other end."""
        if channel not in self._routes:
            self._routes[channel] = self._directions.route(channel)
        return self._routes[channel]

    def group_and_root(self, source: int) -> tuple[dist.ProcessGroup, int]:
        """A group of all ranks for collectives, which only gloo has, and the rank in it of a pipeline rank."""
        return self._directions.group_and_root(source)

    def check_streams(self) -> None:
        """With NCCL, check that every communicator of the rank has a stream of its own; called when it has all groups.

        Raises:
            UserError: see ``nccl.check_streams``.
        """
        if is_nccl(self._directions.backend):
            own = [channel for channel in self._opened if self.rank in channel]
            check_streams(len(own), tuple(map(torchs, self.groups)))

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
            group, peer = self.route(message.channel)
            work = group.send([tensor], peer, 0)
        except RuntimeError as error:
            raise not_sent(message, reason_of(error)) from error
        self._in_flight[message] = (work, tensor)

    def post(self, message: Message, buffer: torch.Tensor) -> Receive:
        """Post a receive into ``buffer``, which must have the shape and dtype of the sent tensor.

        Raises:
            PeerError: the sender is known to be gone.
        """
        staged = torch.empty_like(buffer, device="cpu") if self._stages(buffer) else None
        target = buffer if staged is None else staged
        try:
            group, peer = self.route(message.channel)
            work = group.recv([target], peer, 0)
        except RuntimeError as error:
            raise not_received(message, "continue", reason_of(error)) from error
        return Receive(work, buffer, staged, message, self._watchdog)

    def settle(self, message: Message) -> None:
        """Wait until the send of ``message`` is complete, then release its buffer. With NCCL, the compute stream waits.

        Raises:
            PeerError: the receiver died or did not receive the message within the group's timeout. With NCCL, the
                watchdog ends the process with the same message instead.
        """
        work, _ = self._in_flight.pop(message)
        _wait(work, self._watchdog, lambda reason: not_sent(message, reason))

    def _stages(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is staged in host memory: gloo, which first iterations use, sends only that."""
        return self._is_gloo and not tensor.is_cpu

    def forget(self) -> None:
        """Release the buffers of all sends, because their iteration has failed; the groups must be ``cut``."""
        self._in_flight.clear()

    def close(self) -> None:
        """Destroy the process groups; no message may be in flight."""
        if self._watchdog is not None:
            self._watchdog.close()
        self._directions.close()

    @property
    def num_in_flight(self) -> int:
        """Number of sends not yet settled; 0 between iterations."""
        return len(self._in_flight)


def _round(channel: Channel) -> tuple[int, Channel]:
    """The place of a channel in the order of opening: neighbours connect in pairs, not one after the other."""
    return min(channel) % 2, channel


def _wait(work: dist.Work, watchdog: Watchdog | None, failure: Callable[[str], PeerError]) -> None:
    """Wait for ``work``; ``failure`` makes the error from a reason."""
    try:
        if watchdog is None:
            work.wait()
        else:
            watchdog.wait(work, failure)
    except RuntimeError as error:
        raise failure(reason_of(error)) from error


def not_received(message: Message, purpose: str, reason: str) -> PeerError:
    """The error if a message does not arrive; ``purpose`` is what the receiver could not do."""
    m = message
    return PeerError(
        f"pipeline rank {m.target} could not {purpose}: the output of {m.value} did not arrive from pipeline rank "
        f"{m.source} on channel {m.source}>{m.target} ({reason}); rank {m.source} has failed or hangs: look at "
        "its output first"
    )


def not_sent(message: Message, reason: str) -> PeerError:
    """The error if a message cannot be delivered."""
    m = message
    return PeerError(
        f"pipeline rank {m.source} could not deliver the output of {m.value} to pipeline rank {m.target} on channel "
        f"{m.source}>{m.target} ({reason}); rank {m.target} has failed or hangs: look at its output first"
    )


def reason_of(error: BaseException) -> str:
    """The reason, as one phrase, in an error of torch.distributed."""
    lines = str(error).strip().splitlines()
    match = _ONLY_THE_REASON.match(lines[0]) if lines else None
    return match.group(1) if match else type(error).__name__

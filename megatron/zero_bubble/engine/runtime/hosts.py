"""Numbers that the hosts of a pipeline tell each other, over gloo, without a wait for any device."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import PeerError
from megatron.zero_bubble.core.ir.ops import Channel
from megatron.zero_bubble.engine.runtime.transport import Transport, reason_of

Failure = Callable[[str], PeerError]
"""Makes the error from a reason."""


class Numbers:
    """Integers under way between two hosts.

    Args:
        work: the transfer, for which gloo allows one wait only.
        content: its memory, which ``buffer`` shares.
        failure: makes the error if the other host is lost.
    """

    def __init__(self, work: dist.Work, content: array[int], buffer: torch.Tensor, failure: Failure) -> None:
        self._transfer: tuple[dist.Work, Failure] | None = work, failure
        self._content, self._buffer = content, buffer

    def wait(self) -> Sequence[int]:
        """Wait for the end of the transfer; may be called again.

        Raises:
            PeerError: the other rank died, or took longer than the timeout of the group.
        """
        if self._transfer is not None:
            (work, failure), self._transfer = self._transfer, None
            try:
                work.wait()
            except RuntimeError as error:
                raise failure(reason_of(error)) from error
        return self._content


class Hosts:
    """The hosts of one pipeline.

    Args:
        transport: connects them by gloo; its channels must be open.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def channels(self) -> list[Channel]:
        """The open channels of the pipeline, in one order on all ranks."""
        return self._transport.channels

    def send(self, channel: Channel, numbers: Sequence[int], tag: int, failure: Failure) -> Numbers:
        """Start sending integers; the result must be kept until it has been waited for.

        Args:
            tag: separates kinds of messages; numbers of a kind arrive in the order in which they are sent.

        Raises:
            PeerError: the receiver is known to be gone.
        """
        return self._transfer(channel, array("q", numbers), tag, failure, sends=True)

    def receive(self, channel: Channel, count: int, tag: int, failure: Failure) -> Numbers:
        """Expect ``count`` integers; never waits.

        Raises:
            PeerError: the sender is known to be gone.
        """
        return self._transfer(channel, array("q", bytes(8 * count)), tag, failure, sends=False)

    def broadcast(self, numbers: Sequence[int], source: int) -> list[int]:
        """Return the numbers of the rank ``source``. A collective call, with equally many numbers on all ranks.

        Raises:
            PeerError: another rank died, or did not take part within the timeout of the group.
        """
        content = array("q", numbers)
        group, root = self._transport.group_and_root(source)
        try:
            group.broadcast(torch.frombuffer(content, dtype=torch.int64), root).wait()
        except RuntimeError as error:
            raise PeerError(
                f"pipeline rank {source} did not tell pipeline rank {self.rank} the shapes of its microbatches "
                f"({reason_of(error)}); a rank has failed or hangs: look for the first error of the other ranks"
            ) from error
        return list(content)

    def _transfer(self, channel: Channel, content: array[int], tag: int, failure: Failure, sends: bool) -> Numbers:
        buffer = torch.frombuffer(content, dtype=torch.int64)
        try:
            group, peer = self._transport.route(channel)
            work = (group.send if sends else group.recv)([buffer], peer, tag)
        except RuntimeError as error:
            raise failure(reason_of(error)) from error
        return Numbers(work, content, buffer, failure)

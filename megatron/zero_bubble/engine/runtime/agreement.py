"""The comparison of what the ranks of a pipeline know of an iteration, before messages whose shapes depend on it.

Every rank tells those that it sends to, when it begins. A rank waits for that of another only before it expects its
first message, which comes later anyway, so no iteration begins later for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.zero_bubble.core.errors import PeerError, UserError
from megatron.zero_bubble.core.ir import Message
from megatron.zero_bubble.core.ir.ops import Channel
from megatron.zero_bubble.engine.runtime.handler import Awaited
from megatron.zero_bubble.engine.runtime.handlers import Channels
from megatron.zero_bubble.engine.runtime.hosts import Hosts, Numbers

TAG = 2


class Agreement:
    """What this rank has sent the others in one iteration, and what it expects from them.

    Args:
        hosts: of the pipeline.
        own: what this rank knows, as many numbers as on the other ranks.
        differs: makes the error from the rank of another one and its numbers.
    """

    def __init__(
        self,
        hosts: Hosts,
        own: Sequence[int],
        differs: Callable[[int, Sequence[int]], UserError],
    ) -> None:
        self._own, self._differs = list(own), differs
        incoming = [channel for channel in hosts.channels if channel[1] == hosts.rank]
        outgoing = [channel for channel in hosts.channels if channel[0] == hosts.rank]
        self._expected = {each: hosts.receive(each, len(own), TAG, _lost(each[0])) for each in incoming}
        self._sent: list[Numbers] = [hosts.send(each, own, TAG, _lost(each[1])) for each in outgoing]

    def check(self, channel: Channel) -> None:
        """Wait until the source of a channel has begun the iteration, unless it is known to have.

        Raises:
            UserError: it knows something else.
            PeerError: it died.
        """
        if channel in self._expected:
            other = self._expected.pop(channel).wait()
            if list(other) != self._own:
                raise self._differs(channel[0], other)

    def check_all(self) -> None:
        """``check`` all channels to this rank."""
        for channel in list(self._expected):
            self.check(channel)

    def settle(self) -> None:
        """Wait until the others have begun too.

        Raises:
            PeerError: one of them died.
        """
        while self._sent:
            self._sent.pop().wait()


class AgreedChannels:
    """``channels`` that expect no message of a rank before it is known to agree."""

    def __init__(self, channels: Channels, agreement: Agreement) -> None:
        self._channels, self._agreement = channels, agreement
        self.send, self.settle = channels.send, channels.settle

    def post(self, message: Message, buffer: Any) -> Awaited:
        """See ``Channels``."""
        self._agreement.check(message.channel)
        return self._channels.post(message, buffer)


def _lost(rank: int) -> Callable[[str], PeerError]:
    return lambda reason: PeerError(
        f"pipeline rank {rank} did not begin the iteration ({reason}); it has failed or hangs: look at its output first"
    )

"""Channels for messages whose shapes only their sender knows: a header with the shape precedes every activation.

Headers go from host to host, so that no rank waits for a device. Gradients need none: they have the shape of the stage
output that this rank has sent.

A receive cannot be posted before its shape is known, so it is posted when its value is needed, after those before it on
its channel. Plans must therefore post receives ``late``: their receives are followed by the pass that needs them, and
what is proved of them holds here too. A host waits for a header only where that pass would wait for the message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megatron.zero_bubble.core.errors import PeerError
from megatron.zero_bubble.core.ir import Message
from megatron.zero_bubble.core.ir.ops import Channel
from megatron.zero_bubble.engine.runtime.handler import Awaited
from megatron.zero_bubble.engine.runtime.hosts import Hosts, Numbers
from megatron.zero_bubble.engine.runtime.transport import Transport, not_received, not_sent

TAG = 1
_MOST_DIMENSIONS = 4

_Output = tuple[int, int, int]
"""A stage, a microbatch and a slice."""


class HeaderedChannels:
    """The channels of one pipeline while a plan runs; implements ``handlers.Channels``.

    Args:
        transport: moves the tensors.
        hosts: move the headers.
        new: makes an uninitialized tensor of a shape.
    """

    def __init__(self, transport: Transport, hosts: Hosts, new: Callable[[Sequence[int]], torch.Tensor]) -> None:
        self._transport, self._hosts, self._new = transport, hosts, new
        self._sent: dict[_Output, torch.Size] = {}
        # Nothing here refers to what refers to this, or process groups would live until the next search for garbage.
        self._arriving: dict[_Output, Numbers] = {}
        self._headers: dict[Message, Numbers] = {}
        self._tensors: set[Message] = set()
        self._pending: dict[Channel, deque[_Expected]] = {}

    def send(self, message: Message, tensor: torch.Tensor | None) -> None:
        """Start sending; never waits for the receiver to be ready.

        Args:
            tensor: None if the ranks stop. The receiver then gets a header that says so. For a gradient, whose receive
                may be posted, it gets any tensor of the right shape.

        Raises:
            PeerError: the receiver is known to be gone.
        """
        if message.is_activation:
            shape = () if tensor is None else tensor.shape
            header = (len(shape), *shape, *(_MOST_DIMENSIONS - len(shape)) * (0,))
            self._headers[message] = self._hosts.send(message.channel, header, TAG, partial(not_sent, message))
            if tensor is not None:
                self._sent[_output(message)] = tensor.shape
        elif tensor is None:
            tensor = self._new(_shape(self._arriving[_output(message)]))
        if tensor is not None:
            self._transport.send(message, tensor)
            self._tensors.add(message)

    def post(self, message: Message, _buffer: object = None) -> Awaited:
        """Expect a message; the receive of its tensor is posted now if no other is pending on its channel.

        Raises:
            PeerError: the sender is known to be gone.
        """
        expected = _Expected(self, message)
        if message.is_activation:
            expected.header = self._hosts.receive(message.channel, 1 + _MOST_DIMENSIONS, TAG, expected.lost)
            self._arriving[_output(message)] = expected.header
        pending = self._pending.setdefault(message.channel, deque())
        pending.append(expected)
        if not message.is_activation and len(pending) == 1:
            self.post_up_to(expected)
        return expected

    def post_up_to(self, last: _Expected) -> None:
        """Post the pending receives of a channel up to ``last``, as soon as their headers have arrived."""
        pending = self._pending[last.message.channel]
        while not last.is_posted:
            expected = pending.popleft()
            expected.is_posted = True
            if shape := expected.shape():
                expected.receive = self._transport.post(expected.message, self._new(shape))

    def settle(self, message: Message) -> None:
        """See ``Transport``. If the ranks stop, also post all pending receives: other ranks may wait for them here."""
        for pending in self._pending.values():
            if pending:
                self.post_up_to(pending[-1])
        if message in self._headers:
            self._headers.pop(message).wait()
        if message in self._tensors:
            self._tensors.discard(message)
            self._transport.settle(message)

    def shape_of_gradient(self, message: Message) -> Sequence[int]:
        """The shape of the stage output that this rank has sent."""
        return self._sent[_output(message)]


class _Expected(Awaited):
    """A message whose receive may not be posted yet.

    Attributes:
        header: of an activation.
        receive: None if it is not posted, or the ranks have stopped and nothing follows.
    """

    def __init__(self, channels: HeaderedChannels, message: Message) -> None:
        self._channels, self.message = channels, message
        self.header: Numbers | None = None
        self.receive: Awaited | None = None
        self.is_posted = False
        self._purpose = "continue"

    def lost(self, reason: str) -> PeerError:
        """The error if the header does not arrive."""
        return not_received(self.message, self._purpose, reason)

    def shape(self) -> Sequence[int]:
        """The shape, for which the host may have to wait; empty if nothing follows."""
        if self.header is None:
            return self._channels.shape_of_gradient(self.message)
        return _shape(self.header)

    def wait(self, needed_by: object) -> Any:
        """See ``Receive``; None if the ranks have stopped and nothing follows."""
        self._purpose = f"run {needed_by}"
        self._channels.post_up_to(self)
        return None if self.receive is None else self.receive.wait(needed_by)


def _shape(header: Numbers) -> Sequence[int]:
    number, *sizes = header.wait()
    return sizes[:number]


def _output(message: Message) -> _Output:
    """The stage output that a message is, or whose gradient it is."""
    stage, _, microbatch, slice_ = message.producer
    return stage - (not message.is_activation), microbatch, slice_

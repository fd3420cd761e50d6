"""Channels for messages whose shapes only their sender knows: a header with the shapes precedes every activation.

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
from megatron.zero_bubble.engine.runtime.packing import (
    StageOutput,
    TensorSpec,
    of_message,
    pack,
    producing,
    specs_of,
    unpack,
)
from megatron.zero_bubble.engine.runtime.transport import Transport, not_received, not_sent

TAG = 1
MOST_DIMENSIONS = 4
_NUMBERS = 1 + MOST_DIMENSIONS
"""Numbers of a header per tensor: that of its dimensions and 1, or 0 if nothing follows, and their sizes."""

_Output = tuple[int, int, int]
"""A stage, a microbatch and a slice."""


class HeaderedChannels:
    """The channels of one pipeline while a plan runs; implements ``handlers.Channels``.

    Args:
        transport: moves the tensors.
        hosts: move the headers.
        dtypes: returns those of the tensors in the output of a stage, which are as many in all microbatches.
        new: makes an uninitialized buffer for the tensors of a message.
    """

    def __init__(
        self,
        transport: Transport,
        hosts: Hosts,
        dtypes: Callable[[int], Sequence[torch.dtype]],
        new: Callable[[Message, StageOutput], torch.Tensor],
    ) -> None:
        self._transport, self._hosts, self._dtypes, self._new = transport, hosts, dtypes, new
        self._sent: dict[_Output, StageOutput] = {}
        # Nothing here refers to what refers to this, or process groups would live until the next search for garbage.
        self._arriving: dict[_Output, Numbers] = {}
        self._headers: dict[Message, Numbers] = {}
        self._tensors: set[Message] = set()
        self._pending: dict[Channel, deque[_Expected]] = {}

    def send(self, message: Message, value: torch.Tensor | tuple[torch.Tensor, ...] | None) -> None:
        """Start sending; never waits for the receiver to be ready.

        Args:
            value: None if the ranks stop. The receiver then gets a header that says so. For a gradient, whose receive
                may be posted, it gets any buffer of the right size.

        Raises:
            PeerError: the receiver is known to be gone.
        """
        buffer = pack(value) if isinstance(value, tuple) else value
        if message.is_activation:
            sent = () if value is None else specs_of(value)
            header = _header(sent) if sent else [0] * self._length(message)
            self._headers[message] = self._hosts.send(message.channel, header, TAG, partial(not_sent, message))
            self._sent[_output(message)] = sent
        elif buffer is None and (specs := self.specs_in(self._arriving[_output(message)], message)):
            buffer = self._new(message, of_message(specs, message))
        if buffer is not None:
            self._transport.send(message, buffer)
            self._tensors.add(message)

    def post(self, message: Message, _buffer: object = None) -> Awaited:
        """Expect a message; the receive of its tensor is posted now if no other is pending on its channel.

        Raises:
            PeerError: the sender is known to be gone.
        """
        expected = _Expected(self, message)
        if message.is_activation:
            expected.header = self._hosts.receive(message.channel, self._length(message), TAG, expected.lost)
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
            if specs := expected.specs():
                expected.receive = self._transport.post(expected.message, self._new(expected.message, specs))

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

    def specs_of_gradient(self, message: Message) -> StageOutput:
        """The tensors of a gradient: those of the stage output that this rank has sent."""
        return of_message(self._sent[_output(message)], message)

    def specs_in(self, header: Numbers, message: Message) -> StageOutput:
        """The tensors that follow a header, for which the host may have to wait; empty if nothing follows."""
        numbers = header.wait()
        if not numbers[0]:
            return ()
        each = (numbers[start : start + _NUMBERS] for start in range(0, len(numbers), _NUMBERS))
        shapes = (tuple(sizes[: above - 1]) for above, *sizes in each)
        return tuple(map(TensorSpec, shapes, self._dtypes(producing(message))))

    def is_packed(self, message: Message) -> bool:
        """Whether the stage has several tensors."""
        return len(self._dtypes(producing(message))) > 1

    def _length(self, message: Message) -> int:
        return _NUMBERS * len(self._dtypes(producing(message)))


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
        self._specs: StageOutput = ()
        self.is_posted = False
        self._purpose = "continue"

    def lost(self, reason: str) -> PeerError:
        """The error if the header does not arrive."""
        return not_received(self.message, self._purpose, reason)

    def specs(self) -> StageOutput:
        """The tensors, for whose shapes the host may have to wait; empty if nothing follows."""
        of, message = self._channels, self.message
        self._specs = of.specs_of_gradient(message) if self.header is None else of.specs_in(self.header, message)
        return self._specs

    def wait(self, needed_by: object) -> Any:
        """See ``Receive``; None if the ranks have stopped and nothing follows."""
        self._purpose = f"run {needed_by}"
        self._channels.post_up_to(self)
        if self.receive is None:
            return None
        buffer = self.receive.wait(needed_by)
        return unpack(buffer, self._specs) if self._channels.is_packed(self.message) else buffer


def _header(sent: StageOutput) -> list[int]:
    return [number for shape, _ in sent for number in (1 + len(shape), *shape, *(MOST_DIMENSIONS - len(shape)) * (0,))]


def _output(message: Message) -> _Output:
    """The stage output that a message is, or whose gradient it is."""
    return producing(message), message.producer.microbatch, message.producer.slice

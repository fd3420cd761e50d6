"""Links with latency on the virtual clock."""

from __future__ import annotations

import torch

from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.ir import Message
from megatron.zero_bubble.runtime.executor import Awaited
from megatron.zero_bubble.runtime.transport import Transport


class VirtualLinks:
    """A transport that adds the latency of a link to its messages: the first element of a tensor is the time at which
    it was produced, and after arrival the time at which it arrived.
    """

    def __init__(self, transport: Transport, costs: PassCosts) -> None:
        self._transport, self._costs = transport, costs
        self.rank, self.send, self.settle = transport.rank, transport.send, transport.settle

    def post(self, message: Message, buffer: torch.Tensor) -> Awaited:
        """As ``Transport.post``."""
        return _Late(self._transport.post(message, buffer), self._costs.comm(*message.channel))


class _Late(Awaited):
    def __init__(self, receive: Awaited, ms: float) -> None:
        self._receive, self._ms = receive, ms

    def wait(self, needed_by: object) -> torch.Tensor:
        tensor: torch.Tensor = self._receive.wait(needed_by)
        tensor[0] += self._ms
        return tensor

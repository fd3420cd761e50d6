"""What a stage hands to the next one: a tensor, or a tuple of several, which one message carries in one buffer.

So a plan has one message per stage and microbatch, whatever the stages exchange, and what is proved of its messages
holds for all models. A single tensor is sent as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch

from megatron.zero_bubble.core.ir import Message
from megatron.zero_bubble.engine.runtime.handler import Awaited

_ALIGNED = 16
"""Bytes to a multiple of which every tensor of a buffer begins, so that it can have any dtype."""


class TensorSpec(NamedTuple):
    """What is known of a tensor before it exists."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.shape} in {str(self.dtype).removeprefix('torch.')}"


StageOutput: TypeAlias = tuple[TensorSpec, ...]
"""The tensors that a stage hands to the next one. A stage that has several handles them as a tuple."""


def of_message(output: StageOutput, message: Message) -> StageOutput:
    """The tensors of a message from or to the stage with this output; of several, integers have no gradient."""
    if message.is_activation or len(output) == 1:
        return output
    return tuple(each for each in output if each.dtype.is_floating_point)


def producing(message: Message) -> int:
    """The stage whose output a message is, or whose gradient."""
    return message.producer.stage - (not message.is_activation)


def specs_of(value: torch.Tensor | tuple[torch.Tensor, ...]) -> StageOutput:
    """The specs of what a stage hands on."""
    tensors = value if isinstance(value, tuple) else (value,)
    return tuple(TensorSpec(tuple(each.shape), each.dtype) for each in tensors)


def buffer_of(specs: StageOutput) -> TensorSpec:
    """The one buffer for several tensors."""
    return TensorSpec((list(_ends(specs))[-1],), torch.uint8)


def new_buffer(specs: StageOutput, is_packed: bool, device: torch.device) -> torch.Tensor:
    """An uninitialized buffer for a message."""
    [(shape, dtype)] = (buffer_of(specs),) if is_packed else specs
    return torch.empty(shape, dtype=dtype, device=device)


def pack(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Copy tensors into one new buffer."""
    specs = specs_of(tensors)
    buffer = new_buffer(specs, True, tensors[0].device)
    for part, tensor in zip(unpack(buffer, specs), tensors, strict=True):
        part.copy_(tensor)
    return buffer


def unpack(buffer: torch.Tensor, specs: StageOutput) -> tuple[torch.Tensor, ...]:
    """The tensors in a buffer, which share its memory. To autograd, writing to one does not change the others."""
    places = zip(pairwise(_ends(specs)), specs, strict=True)
    return tuple(
        buffer[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape).data for (start, _), spec in places
    )


def _ends(specs: StageOutput) -> Iterator[int]:
    return accumulate((-(-each.num_bytes // _ALIGNED) * _ALIGNED for each in specs), initial=0)


class PackedChannels:
    """Channels for stages of which some have several tensors; implements ``handlers.Channels``.

    Args:
        channels: move the buffers.
        packed: returns the tensors of a message; None for a single one that is sent as it is.
    """

    def __init__(self, channels: Any, packed: Callable[[Message], StageOutput | None]) -> None:
        self._channels, self._packed = channels, packed
        self.settle = channels.settle

    def send(self, message: Message, value: Any) -> None:
        """Start sending; the value is a buffer already if the ranks stop."""
        self._channels.send(message, pack(value) if isinstance(value, tuple) else value)

    def post(self, message: Message, buffer: Any) -> Awaited:
        received, specs = self._channels.post(message, buffer), self._packed(message)
        return received if specs is None else _Packed(received, specs)


class _Packed(Awaited):
    def __init__(self, received: Awaited, specs: StageOutput) -> None:
        self._received, self._specs = received, specs

    def wait(self, needed_by: object) -> tuple[torch.Tensor, ...]:
        """See ``transport.Receive``."""
        return unpack(self._received.wait(needed_by), self._specs)

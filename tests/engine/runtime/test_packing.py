"""Several tensors travel in one buffer, whatever their dtypes are."""

from __future__ import annotations

from typing import Any

import torch

from megatron.zero_bubble.core.ir import Message, Value
from megatron.zero_bubble.core.ir.passes import B, F, Pass
from megatron.zero_bubble.engine.runtime.handler import Awaited
from megatron.zero_bubble.engine.runtime.packing import (
    PackedChannels,
    StageOutput,
    TensorSpec,
    new_buffer,
    of_message,
    pack,
    producing,
    unpack,
)

TENSORS = (
    torch.arange(3, dtype=torch.bfloat16),
    torch.arange(6, dtype=torch.float64).view(2, 3).t(),
    torch.tensor(7, dtype=torch.int64),
    torch.empty(0, 4),
)
SPECS: StageOutput = tuple(TensorSpec(tuple(each.shape), each.dtype) for each in TENSORS)
FORWARD, BACKWARD = (Message(Value(Pass(stage, kind, 0)), 0, 1) for stage, kind in ((1, F), (2, B)))
CPU = torch.device("cpu")


class Loop(Awaited):
    """Channels on which what is sent arrives at once."""

    def __init__(self) -> None:
        self.sent: Any = None

    def send(self, _message: Message, buffer: Any) -> None:
        self.sent = buffer

    def post(self, _message: Message, _buffer: Any) -> Awaited:
        return self

    def settle(self, _message: Message) -> None: ...

    def wait(self, _needed_by: object) -> Any:
        return self.sent


def test_packed_tensors_come_back() -> None:
    buffer = pack(TENSORS)
    assert buffer.shape == new_buffer(SPECS, True, CPU).shape
    for found, tensor in zip(unpack(buffer, SPECS), TENSORS, strict=True):
        assert found.dtype == tensor.dtype and found.is_contiguous()
        assert torch.equal(found, tensor)


def test_writing_to_a_tensor_does_not_change_the_others_to_autograd() -> None:
    weights, numbers = unpack(pack((torch.ones(3), torch.arange(4))), (TensorSpec((3,), torch.float32), SPECS[2]))
    product = (weights.detach().requires_grad_() * (factor := torch.ones(3, requires_grad=True))).sum()
    numbers.add_(1)
    product.backward()
    assert torch.equal(factor.grad, torch.ones(3))


def test_a_gradient_has_the_floating_point_tensors_of_the_output_that_it_belongs_to() -> None:
    assert producing(FORWARD) == producing(BACKWARD) == 1
    assert of_message(SPECS, FORWARD) == SPECS
    assert of_message(SPECS, BACKWARD) == (SPECS[0], SPECS[1], SPECS[3])
    assert of_message(SPECS[2:3], BACKWARD) == SPECS[2:3], "a single tensor is sent as it is"


def test_channels_pack_tuples_only() -> None:
    loop = Loop()
    channels = PackedChannels(loop, lambda message: SPECS if message is FORWARD else None)
    channels.send(FORWARD, TENSORS)
    received = channels.post(FORWARD, None).wait("a pass")
    assert all(map(torch.equal, received, TENSORS))
    forgotten = new_buffer(SPECS, True, CPU)
    channels.send(FORWARD, forgotten)
    assert loop.sent is forgotten, "when all ranks stop, any buffer is sent"
    channels.send(BACKWARD, TENSORS[0])
    assert channels.post(BACKWARD, None).wait("a pass") is TENSORS[0]

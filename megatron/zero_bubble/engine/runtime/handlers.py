"""Handlers for the basic ops of a plan: passes run on stages, messages go through channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from megatron.zero_bubble.core.ir import Compute, Message, Op, Pass, Recv, Send, Settle, Validate
from megatron.zero_bubble.engine.runtime.handler import FORGOTTEN, STOP, Awaited, Handler
from megatron.zero_bubble.engine.runtime.observer import IterationObserver

# A torch function mode, such as that of the CPU platform, runs Python code in every call of torch. Messages do not need
# it: their tensors are on the device already.
without_function_modes = torch._C.DisableTorchFunction

NewBuffer = Callable[[Message], torch.Tensor | None]


class Stage(Protocol):
    """One stage of the model on this rank."""

    def run(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run one pass.

        Args:
            inputs: values in the order of ``flow.inputs(work)``. The ``out`` of another stage is a tensor with the
                shape of the boundary between the two stages; values that this stage made are the objects that it
                returned.

        Returns:
            values in the order of ``flow.outputs(work)``.
        """
        ...


class Channels(Protocol):
    """Moves tensors between ranks; implemented by ``transport.Transport`` and ``headers.HeaderedChannels``."""

    def send(self, message: Message, tensor: Any) -> None: ...

    def post(self, message: Message, buffer: Any) -> Awaited: ...

    def settle(self, message: Message) -> None: ...


def handlers(
    stages: Mapping[int, Stage],
    channels: Channels,
    new_buffer: NewBuffer,
    observer: IterationObserver | None = None,
    validate: Callable[[], bool] = lambda: True,
) -> dict[type[Op], Handler]:
    """The handlers of one iteration.

    Args:
        stages: stages of this rank, by stage number.
        new_buffer: returns an uninitialized tensor on the compute device with the shape and dtype of a message; None if
            only the channels know the shape.
        observer: is notified of messages and waits.
        validate: returns whether the last optimizer step was correct; a rejected step is corrected when the messages
            are drained.
    """
    messages = _Messages(channels, new_buffer) if observer is None else _Observed(channels, new_buffer, observer)

    def compute(op: Compute, inputs: Sequence[Any]) -> Sequence[Any]:
        return stages[op.work.stage].run(op.work, inputs)

    def learn_validity(_op: Validate, _inputs: Sequence[Any]) -> object:
        if observer is not None:
            observer.waiting()
        right = validate()
        if observer is not None:
            observer.validated(right)
        return None if right else STOP

    by_op: dict[type[Op], Handler] = {
        Compute: compute,
        Send: messages.send,
        Recv: messages.post,
        Settle: messages.settle,
        Validate: learn_validity,
    }
    return by_op


class _Messages:
    def __init__(self, channels: Channels, new_buffer: NewBuffer) -> None:
        self._channels = channels
        self._new_buffer = new_buffer

    def send(self, op: Send, inputs: Sequence[Any]) -> None:
        message, (tensor,) = op.message, inputs
        assert tensor is not None, f"{message.producer} has a consumer on rank {message.target} but no output"
        # When the ranks stop, the receiver still expects a message, so send an uninitialized buffer.
        with without_function_modes():
            self._channels.send(message, self._new_buffer(message) if tensor is FORGOTTEN else tensor)

    def post(self, op: Recv, _inputs: Sequence[Any]) -> tuple[Awaited]:
        message = op.message
        with without_function_modes():
            return (self._channels.post(message, self._new_buffer(message)),)

    def settle(self, op: Settle, _inputs: Sequence[Any]) -> None:
        self._channels.settle(op.message)


class _Observed(_Messages):
    """Message handlers that notify ``observer``."""

    def __init__(self, channels: Channels, new_buffer: NewBuffer, observer: IterationObserver) -> None:
        super().__init__(channels, new_buffer)
        self._observer = observer

    def send(self, op: Send, inputs: Sequence[Any]) -> None:
        super().send(op, inputs)
        self._observer.sent(op.message)

    def post(self, op: Recv, _inputs: Sequence[Any]) -> tuple[Awaited]:
        message = op.message
        with without_function_modes():
            buffer = self._new_buffer(message)
        self._observer.posted(message)
        with without_function_modes():
            receive = self._channels.post(message, buffer)
        return (_ObservedReceive(receive, message, self._observer),)

    def settle(self, op: Settle, _inputs: Sequence[Any]) -> None:
        self._observer.waiting()
        self._channels.settle(op.message)
        self._observer.settled(op.message)


class _ObservedReceive(Awaited):
    def __init__(self, receive: Awaited, message: Message, observer: IterationObserver) -> None:
        self._receive, self._message, self._observer = receive, message, observer

    def wait(self, needed_by: object) -> Any:
        self._observer.waiting()
        tensor = self._receive.wait(needed_by)
        self._observer.received(self._message)
        return tensor

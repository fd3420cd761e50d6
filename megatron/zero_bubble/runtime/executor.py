"""The executor: a loop over a dispatch table.

It knows ops, not models: what a pass computes is its ``Stage``'s business, so the same loop trains a GPT, and runs
stages that only keep a clock (``emulate``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from megatron.zero_bubble.ir import Kind, Pass
from megatron.zero_bubble.plan import Compute, Message, Op, Plan, Recv, Send, Settle, Validate


class Stage(Protocol):
    """One stage of the model, held by this rank; tensors have the shape that crosses the stage's boundary."""

    def forward(self, work: Pass, x: torch.Tensor | None, split: bool) -> torch.Tensor | None:
        """F: the stage's output, None on the last stage. ``split`` says that B and W will come separately."""
        ...

    def backward(self, work: Pass, grad: torch.Tensor | None) -> torch.Tensor | None:
        """B or BW: the gradient of the stage's input, None on the first stage."""
        ...

    def backward_weight(self, work: Pass) -> None:
        """W: the weight gradients that the B of the same microbatch left behind."""
        ...


class Awaited(Protocol):
    """A posted receive."""

    def wait(self, needed_by: object) -> torch.Tensor:
        """The tensor, on the compute device, once it is here."""
        ...


class Channels(Protocol):
    """What moves tensors between ranks: ``p2p.Transport``, or one that is watched."""

    def send(self, message: Message, tensor: torch.Tensor) -> None: ...

    def post(self, message: Message, buffer: torch.Tensor) -> Awaited: ...

    def settle(self, message: Message) -> None: ...


class PassObserver(Protocol):
    """Told when a pass begins, its inputs at hand, and when it has ended."""

    def begin(self, work: Pass) -> None: ...

    def end(self, work: Pass) -> None: ...


def together(*observers: PassObserver | None) -> PassObserver | None:
    """Those observers that there are, as one; the last begins last and ends first, so that it measures the least."""
    present = [observer for observer in observers if observer is not None]
    return _Together(present) if len(present) > 1 else next(iter(present), None)


class _Together:
    def __init__(self, observers: list[PassObserver]) -> None:
        self._observers = observers

    def begin(self, work: Pass) -> None:
        for observer in self._observers:
            observer.begin(work)

    def end(self, work: Pass) -> None:
        for observer in reversed(self._observers):
            observer.end(work)


class Executor:
    """Runs one rank's ops of a plan.

    Args:
        plan: a proved plan.
        rank: which row of the plan is ours.
        stages: our stages by number.
        transport: the channels to the other ranks.
        new_buffer: an empty tensor, on the compute device, of the shape and dtype of a message.
        observer: told of every pass; None costs nothing.
        validate: whether the last optimizer step was right; where it was not, it is when this returns.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Channels,
        new_buffer: Callable[[Message], torch.Tensor],
        observer: PassObserver | None = None,
        validate: Callable[[], bool] = lambda: True,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._stages = stages
        self._transport = transport
        self._new_buffer = new_buffer
        self._observer = observer
        self._validate = validate
        self._ready: dict[Pass, torch.Tensor | Awaited] = {}
        self._outgoing: dict[Pass, torch.Tensor] = {}
        self._ops: dict[type, Callable[[Any], None]] = {
            Compute: self._compute,
            Send: self._send,
            Recv: self._recv,
            Settle: self._settle,
        }
        self._passes: dict[Kind, Callable[[Pass], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.BW: self._backward,
            Kind.W: self._backward_weight,
        }

    def run(self) -> bool:
        """Execute every op, in order.

        Returns:
            False when the last optimizer step was wrong: nothing of this iteration counts, no message is left behind,
            and it is to be run again.

        Raises:
            PeerError: another rank died or hangs; the text names it, the pass and the channel.
        """
        for op in self._plan.ops[self._rank]:
            if not isinstance(op, Validate):
                self._ops[type(op)](op)
            elif not self._validate():
                self._drain(self._plan.drain[self._rank])
                return False
        assert not self._ready and not self._outgoing, "a proved plan leaves no tensor behind"
        return True

    def _drain(self, ops: tuple[Op, ...]) -> None:
        """Stop here, with all other ranks: take and give what is under way, for nothing."""
        self._outgoing.clear()
        for op in ops:
            if isinstance(op, Send):
                self._outgoing[op.message.producer] = self._new_buffer(op.message)
            self._ops[type(op)](op)
        for held in self._ready.values():
            if not isinstance(held, torch.Tensor):
                held.wait("stop")
        self._ready.clear()

    def _compute(self, op: Compute) -> None:
        self._passes[op.work.kind](op.work)

    def _send(self, op: Send) -> None:
        self._transport.send(op.message, self._outgoing.pop(op.message.producer))

    def _recv(self, op: Recv) -> None:
        self._ready[op.message.producer] = self._transport.post(op.message, self._new_buffer(op.message))

    def _settle(self, op: Settle) -> None:
        self._transport.settle(op.message)

    def _forward(self, work: Pass) -> None:
        x = self._take(Pass(work.stage - 1, Kind.F, work.microbatch, work.slice), work) if work.stage else None
        split = (work.stage, work.microbatch, work.slice) not in self._plan.schedule.fused
        self._begin(work)
        y = self._stages[work.stage].forward(work, x, split)
        self._end(work)
        self._hand_over(work, work.stage + 1, y)

    def _backward(self, work: Pass) -> None:
        schedule = self._plan.schedule
        grad = None
        if work.stage < schedule.num_stages - 1:
            grad = self._take(schedule.backward_of(work.stage + 1, work.microbatch, work.slice), work)
        self._begin(work)
        grad = self._stages[work.stage].backward(work, grad)
        self._end(work)
        self._hand_over(work, work.stage - 1, grad)

    def _backward_weight(self, work: Pass) -> None:
        self._begin(work)
        self._stages[work.stage].backward_weight(work)
        self._end(work)

    def _take(self, producer: Pass, needed_by: Pass) -> torch.Tensor:
        held = self._ready.pop(producer)
        return held if isinstance(held, torch.Tensor) else held.wait(needed_by)

    def _hand_over(self, work: Pass, consumer: int, tensor: torch.Tensor | None) -> None:
        """Keep an output for the ``Send`` that follows, or, at the turn of a V, for our own next stage: no copy."""
        stage_to_rank = self._plan.schedule.placement.stage_to_rank
        if not 0 <= consumer < len(stage_to_rank):
            return
        assert tensor is not None, f"{work} has a consumer but no output"
        held = self._ready if stage_to_rank[consumer] == self._rank else self._outgoing
        held[work] = tensor

    def _begin(self, work: Pass) -> None:
        if self._observer is not None:
            self._observer.begin(work)

    def _end(self, work: Pass) -> None:
        if self._observer is not None:
            self._observer.end(work)

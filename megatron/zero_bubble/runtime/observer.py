"""What happens in an iteration, for those who measure it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.zero_bubble.ir import Message, Op, Pass


class IterationStart(NamedTuple):
    """The iteration that begins.

    Attributes:
        group: of the pipeline.
        chunks: the rank's model chunks.
        operands: the tensors that a B has left for the given W.
    """

    group: dist.ProcessGroup
    num_microbatches: int
    chunks: Sequence[torch.nn.Module] = ()
    operands: Callable[[Pass], Iterable[torch.Tensor]] = lambda _: ()


class IterationObserver:
    """Watches training iterations; every method does nothing until a subclass gives it something to do.

    ``begin_iteration`` and ``end_iteration`` come once per iteration, on every rank of the pipeline; collective calls
    are fine in them. What lies between may come twice: ``restarted`` says that all of it since ``begin_iteration`` does
    not count and is run again.
    """

    def begin_iteration(self, start: IterationStart) -> None:
        """Before the first op, and before the plan is made."""

    def begin(self, op: Op) -> None:
        """An op that occupies a lane begins, with what it needs there; on other lanes than ``compute`` it is issued."""

    def end(self, op: Op) -> None:
        """It has ended, or, on another lane than ``compute``, was issued."""

    def sent(self, message: Message) -> None:
        """A message was handed to the transport."""

    def posted(self, message: Message) -> None:
        """From now on a message can arrive."""

    def waiting(self) -> None:
        """The rank begins to wait; the next ``received``, ``settled`` or ``validated`` says for what."""

    def received(self, message: Message) -> None:
        """The message that the rank waited for is there."""

    def settled(self, message: Message) -> None:
        """The other rank has the message; its buffer is free."""

    def validated(self, right: bool) -> None:
        """The rank knows whether the last optimizer step was right."""

    def restarted(self) -> None:
        """It was not: the iteration starts again."""

    def end_iteration(self, completed: bool) -> None:
        """After the last op, and all that follows the passes; not ``completed``: an exception is on its way."""

    def close(self) -> None:
        """No more iterations come."""


class Observers(IterationObserver):
    """Several observers as one. They nest: the last sees a ``begin`` last and an ``end`` first, so it measures the
    least of the others' work.
    """

    def __init__(self, observers: Sequence[IterationObserver]) -> None:
        self._observers = tuple(observers)
        self._inner_first = tuple(reversed(self._observers))

    def __bool__(self) -> bool:
        return bool(self._observers)

    def begin_iteration(self, start: IterationStart) -> None:
        for observer in self._observers:
            observer.begin_iteration(start)

    def begin(self, op: Op) -> None:
        for observer in self._observers:
            observer.begin(op)

    def end(self, op: Op) -> None:
        for observer in self._inner_first:
            observer.end(op)

    def sent(self, message: Message) -> None:
        for observer in self._inner_first:
            observer.sent(message)

    def posted(self, message: Message) -> None:
        for observer in self._inner_first:
            observer.posted(message)

    def waiting(self) -> None:
        for observer in self._observers:
            observer.waiting()

    def received(self, message: Message) -> None:
        for observer in self._inner_first:
            observer.received(message)

    def settled(self, message: Message) -> None:
        for observer in self._inner_first:
            observer.settled(message)

    def validated(self, right: bool) -> None:
        for observer in self._inner_first:
            observer.validated(right)

    def restarted(self) -> None:
        for observer in self._observers:
            observer.restarted()

    def end_iteration(self, completed: bool) -> None:
        with contextlib.ExitStack() as ending:  # all end, whatever happens in one of them
            for observer in self._observers:
                ending.callback(observer.end_iteration, completed)

    def close(self) -> None:
        for observer in self._observers:
            observer.close()


@contextlib.contextmanager
def observed(observer: IterationObserver, start: IterationStart) -> Iterator[None]:
    """Around an iteration, which may end in an exception."""
    completed = False
    try:
        observer.begin_iteration(start)
        yield
        completed = True
    finally:
        observer.end_iteration(completed)

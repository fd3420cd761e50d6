"""The interface to observe the events of an iteration, used by all measurements."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.ir import Message, Op, Pass, Schedule
from megatron.zero_bubble.engine.runtime.saved import SavedTensors

_Arguments = ParamSpec("_Arguments")
_Made = TypeVar("_Made")


class IterationStart(NamedTuple):
    """Facts about an iteration, passed to observers when it begins.

    Attributes:
        group: the process group of the pipeline.
        chunks: model chunks of this rank.
        operands: returns what B has stored for a given W pass, or S for a given T pass: the inputs and the output
            gradients of the linears, [tokens, features] each.
        saved: collects what forwards save for their backwards; None under Megatron's own schedules.
        histories: returns the tensors that slices of sequences share, of a stage and microbatch or of all.
        states: the same for what a slice hands to the next one, which no later slice shares.
        varies: whether microbatches may have different lengths, and replicas different numbers of them.
        has_headers: whether a header comes before each message, so that receives are posted late.
    """

    group: dist.ProcessGroup
    num_microbatches: int
    chunks: Sequence[torch.nn.Module] = ()
    operands: Callable[[Pass], Iterable[torch.Tensor]] = lambda _: ()
    histories: Callable[..., Iterable[torch.Tensor]] = lambda *_: ()
    states: Callable[..., Iterable[torch.Tensor]] = lambda *_: ()
    saved: SavedTensors | None = None
    varies: bool = False
    has_headers: bool = False


class IterationObserver:
    """Observes training iterations; all methods do nothing by default.

    ``begin_iteration`` and ``end_iteration`` are called once per iteration on every rank of the pipeline, and may make
    collective calls. The events between them may occur twice: ``restarted`` invalidates all events since
    ``begin_iteration``, and the passes run again.
    """

    def begin_iteration(self, start: IterationStart) -> None:
        """Called before the plan is made and before the first op."""

    def planned(self, schedule: Schedule) -> None:
        """The schedule of the iteration is known; called before the first op, but not for Megatron's own schedules."""

    def begin(self, op: Op) -> None:
        """An op that occupies a lane begins and its inputs are ready; on lanes other than ``compute``, it is issued."""

    def end(self, op: Op) -> None:
        """The op has ended; on lanes other than ``compute``, it has been issued."""

    def started(self, op: Op) -> None:
        """An op on a lane other than ``compute`` starts to run there; may be called in another thread."""

    def completed(self, op: Op) -> None:
        """An op that ``started`` has run; may be called in another thread, also after ``end_iteration``."""

    def sent(self, message: Message) -> None:
        """A message was passed to the transport."""

    def posted(self, message: Message) -> None:
        """A receive is posted, so the message can arrive from now on."""

    def waiting(self) -> None:
        """The rank begins to wait; the next ``received``, ``settled`` or ``validated`` ends the wait."""

    def received(self, message: Message) -> None:
        """The awaited message has arrived."""

    def settled(self, message: Message) -> None:
        """The send of the message is complete and its buffer is free."""

    def validated(self, right: bool) -> None:
        """The last optimizer step is validated; ``right`` is False if forwards ran on weights that are undone."""

    def restarted(self) -> None:
        """The last optimizer step was rejected, and the passes of the iteration start again."""

    def end_iteration(self, completed: bool) -> None:
        """Called after the passes and all steps after them; ``completed`` is False if an exception was raised."""

    def close(self) -> None:
        """Called after the last iteration."""


# All events but ``end_iteration``, by the order in which ``Observers`` passes them on.
_OUTER_FIRST = ("begin_iteration", "planned", "begin", "started", "waiting", "restarted", "close")
_INNER_FIRST = ("end", "completed", "sent", "posted", "received", "settled", "validated")


class Observers(IterationObserver):
    """Combines several observers.

    They nest: the last gets ``begin`` last and ``end`` first, so it sees the least overhead of the others.
    """

    def __init__(self, observers: Sequence[IterationObserver]) -> None:
        self._observers = tuple(observers)
        for events, order in ((_OUTER_FIRST, self._observers), (_INNER_FIRST, self._observers[::-1])):
            for event in events:
                setattr(self, event, _telling([getattr(observer, event) for observer in order]))

    def __bool__(self) -> bool:
        return bool(self._observers)

    def end_iteration(self, completed: bool) -> None:
        with contextlib.ExitStack() as ending:  # call every observer, even if one of them raises
            for observer in self._observers:
                ending.callback(observer.end_iteration, completed)


def _telling(tell: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def event(*args: Any) -> None:
        for each in tell:
            each(*args)

    return event


@contextlib.contextmanager
def observed(observer: IterationObserver, start: IterationStart) -> Iterator[None]:
    """Context around an iteration that calls ``begin_iteration`` and, also after an exception, ``end_iteration``."""
    completed = False
    try:
        observer.begin_iteration(start)
        yield
        completed = True
    finally:
        observer.end_iteration(completed)


def observed_work(
    op: Op, work: Callable[_Arguments, _Made], observer: IterationObserver | None
) -> Callable[_Arguments, _Made]:
    """What a lane runs for ``op``: ``work``, of which ``observer`` is notified when it runs."""
    if observer is None:
        return work

    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Made:
        observer.started(op)
        made = work(*args, **kwargs)
        observer.completed(op)
        return made

    return run

"""Work concurrent with the passes, on streams of its own; done at once on devices without streams."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import torch


class Result(Protocol):
    """The result of a work item on a ``Lane``."""

    def wait(self) -> Any:
        """Make the caller's later work wait for the result, and return it; raises what the work item raised."""


class Lane(Protocol):
    """Runs work items that may wait for other ranks, in order, concurrently with the caller's later work."""

    def start(self, work: Callable[[], Any], uses: Iterable[torch.Tensor]) -> Result:
        """Run ``work`` after everything queued so far. The lane keeps the memory of ``uses``, which includes that of
        tensors that ``work`` makes for the caller, until the caller waits for the result or a later one.

        Raises RuntimeError with the text of what an earlier work item raised, if that is known.
        """

    def join(self) -> None:
        """Make the caller's later work wait for all work items, also for those that raise."""

    def close(self, timeout_s: float) -> bool:
        """Stop the lane when it has run all work items; returns whether it has, within the timeout."""


class ThreadLane:
    """A ``Lane`` for devices without streams: a daemon thread, which does not keep a failing process alive.

    After an error it runs no other work item: the next one would take part in the collective of the failed one. It
    keeps only the error's text: an error collects the frames that raise it, with the values of their passes.

    Args:
        begin: is called by the thread first.
    """

    def __init__(self, begin: Callable[[], object] = lambda: None) -> None:
        self._begin = begin
        self._items: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="lane", daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], Any], uses: Iterable[torch.Tensor]) -> ThreadResult:
        self._check()
        future: Future[Any] = Future()
        self._items.put(partial(self._do, work, future))
        return ThreadResult(future)

    def _do(self, work: Callable[[], Any], future: Future[Any]) -> None:
        try:
            self._check()
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised where the result is needed)
            self._failure = str(error)
            future.set_exception(error)
        finally:
            del future  # its error refers to this frame

    def join(self) -> None:
        reached = threading.Event()
        self._items.put(reached.set)
        reached.wait()

    def close(self, timeout_s: float) -> bool:
        self._items.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _check(self) -> None:
        """Raise what an earlier work item has raised."""
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _run(self) -> None:
        self._begin()
        while (item := self._items.get()) is not None:
            item()
            del item  # and with it the memory that the work uses


class ThreadResult:
    """The result of a work item on a thread; once it has raised an error, it keeps only the text, as the lane does."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> Any:
        if (error := self._future.exception()) is None:
            return self._future.result()
        self._future = Future()
        self._future.set_exception(RuntimeError(str(error)))
        try:
            raise error
        finally:
            del error  # whose traceback refers to this frame


class HostCopy(ABC):
    """A tensor on its way to host memory."""

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """Wait until the copy has arrived, but not for work queued after it started; returns it, without gradient."""


class AlreadyThere(HostCopy):
    """A ``HostCopy`` of a tensor that is in host memory: the tensor itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()

    def wait(self) -> torch.Tensor:
        return self._tensor

"""SIGTERM, or Ctrl-C once: finish the iteration on every rank, save, leave with code 0.

A signal reaches one rank or some, so the ranks vote after every iteration. The vote is one asynchronous all-reduce
whose result is read an iteration later: it costs no wait, and all ranks stop after the same iteration.

Python runs signal handlers between its own instructions, and never while a collective waits in C++ for a peer that
is gone. A watching thread, woken by the interpreter's wake-up descriptor, therefore ends the process when the loop
has not noticed the signal within a grace period.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

import torch
import torch.distributed as dist


class StopRequest:
    """A context that turns SIGTERM and the first SIGINT into a request to stop.

    Args:
        device: where the vote's tensor lives, a device that the world's backend can reduce on.
        rank_name: names this rank in the message of a process that gives up waiting.
        shortest_grace_s: how long an iteration may take after a signal, at least; four times the last one if longer.
    """

    def __init__(self, device: torch.device, rank_name: str, shortest_grace_s: float = 60.0) -> None:
        self._device = device
        self._rank_name = rank_name
        self._requested = threading.Event()
        self._noticed = threading.Event()
        self._vote: tuple[dist.Work, torch.Tensor] | None = None
        self._grace_s = self._shortest_grace_s = shortest_grace_s
        self._alive = False
        self._patient = False
        self._reader, self._writer = socket.socketpair()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        threading.Thread(target=self._watch, name="stop-request", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._noticed.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if error is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending, and torchrun's signal must not cut its words
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()

    def alive(self) -> None:
        """Something that is no iteration, an evaluation, is getting on: a signal's grace starts anew."""
        self._alive = True

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Around what takes its time and must not be cut, a checkpoint."""
        self._patient = True
        try:
            yield
        finally:
            self._patient, self._alive = False, True

    def ended(self) -> None:
        """No iteration will follow: whatever is left to do is done, signal or not."""
        self._noticed.set()

    def vote(self, iteration_s: float) -> None:
        """Start the vote of the iteration that just ended and took ``iteration_s`` seconds; a collective call."""
        self._grace_s = max(self._shortest_grace_s, 4 * iteration_s)
        wish = torch.tensor([float(self._requested.is_set())], device=self._device)
        self._vote = (dist.all_reduce(wish, op=dist.ReduceOp.MAX, async_op=True), wish)

    def decided(self) -> bool:
        """The result of the last vote, the same on every rank. False when none was started."""
        if self._vote is None:
            return False
        work, wish = self._vote
        self._vote = None
        work.wait()
        if not wish.item():
            return False
        self._noticed.set()
        return True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._requested.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C interrupts at once

    def _watch(self) -> None:
        while received := self._reader.recv(1):
            if received[0] in (signal.SIGTERM, signal.SIGINT):
                self._requested.set()
                while not self._noticed.wait(self._grace_s):
                    if self._patient or self._alive:
                        self._alive = False
                        continue
                    print(
                        f"{self._rank_name} was asked to stop but its iteration did not end within "
                        f"{self._grace_s:.0f} s: a peer it waits for does not answer. It exits without saving; the "
                        "last checkpoint is whole.",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(1)

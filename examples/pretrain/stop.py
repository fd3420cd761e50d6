"""Stop cleanly on SIGTERM or the first Ctrl-C: every rank finishes the iteration, saves and exits with code 0.

A signal may reach only some of the ranks, so the ranks vote after every iteration. The vote is one asynchronous
all-reduce between the hosts, whose result is read one iteration later: no rank waits for it, and all ranks stop after
the same iteration.

Python runs signal handlers between bytecode instructions, and so never while a collective waits in C++ for a rank that
was lost. A watchdog thread, woken by the interpreter's wake-up file descriptor, therefore exits the process if the
training loop does not react to the signal within a grace period.
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

_JOIN_S = 10.0


class StopRequest:
    """Context manager that turns SIGTERM and the first SIGINT into a request to stop.

    Args:
        voters: a gloo group of all ranks. With NCCL, a rank could read the vote only after the passes queued before it.
        rank_name: name of this rank in the message that the watchdog prints.
        shortest_grace_s: minimum grace period in seconds; the grace period is four iterations if that is longer.
    """

    def __init__(self, voters: dist.ProcessGroup, rank_name: str, shortest_grace_s: float = 60.0) -> None:
        self._voters = voters
        self._rank_name = rank_name
        self._requested = threading.Event()
        self._noticed = threading.Event()
        self._vote: tuple[dist.Work, torch.Tensor] | None = None
        self._grace_s = self._shortest_grace_s = shortest_grace_s
        self._alive = False
        self._patient = False
        self._reader, self._writer = socket.socketpair()
        self._previous: dict[int, object] = {}
        self._thread = threading.Thread(target=self._watch, name="stop-request", daemon=True)

    def __enter__(self) -> StopRequest:
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._noticed.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if error is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's signal must not cut off the error's message
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.shutdown(socket.SHUT_RDWR)  # ends the thread's wait, also if a forked process has the sockets
        # If the thread freed the last reference to the voters while the interpreter ends, the process would abort.
        self._thread.join(_JOIN_S)
        self._writer.close()
        self._reader.close()

    def alive(self) -> None:
        """Restart the grace period of a signal; call it on progress outside iterations, such as in an evaluation."""
        self._alive = True

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Suspend the grace period in this block, for a long operation that must complete, such as a checkpoint."""
        self._patient = True
        try:
            yield
        finally:
            self._patient, self._alive = False, True

    def ended(self) -> None:
        """Stop watching for signals after the last iteration; the remaining work is done in any case."""
        self._noticed.set()

    def vote(self, iteration_s: float) -> None:
        """Start the vote after an iteration that took ``iteration_s`` seconds; a collective call."""
        self._grace_s = max(self._shortest_grace_s, 4 * iteration_s)
        wish = torch.tensor([float(self._requested.is_set())])
        self._vote = (dist.all_reduce(wish, dist.ReduceOp.MAX, self._voters, async_op=True), wish)

    def decided(self) -> bool:
        """Result of the last vote, the same on every rank; False if no vote was started."""
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
                        f"{self._grace_s:.0f} s: a rank that it waits for does not respond. It exits without saving; "
                        "the last checkpoint is complete.",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(1)

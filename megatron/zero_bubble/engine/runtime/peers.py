"""Ends this rank within seconds when another rank is lost, with a message that names the lost rank.

A failed collective reports at best "connection closed by peer", and that peer may be a surviving rank that gave up
first. A collective that waits on a GPU may not fail at all. Therefore a thread listens to the connections of
``engine/runtime/links.py``. It receives the first loss that rank 0 has detected, prints the message, gives the main
thread a few seconds to exit by itself, and then ends the process.

A machine that loses power or its network closes no connection; only the timeouts of the collectives detect this.
"""

from __future__ import annotations

import atexit
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType

import torch.distributed as dist

from megatron.zero_bubble.engine.runtime.ending import end_process, report
from megatron.zero_bubble.engine.runtime.links import DIED, Links, Loss, Store
from megatron.zero_bubble.engine.runtime.transport import lost_connection

# The time for the main thread to exit by itself, and the time that its error waits for news about a lost rank.
_GRACE_S = 5.0
_NEWS_S = 10.0
# torchrun's agent sends SIGTERM to all ranks as soon as one dies, possibly before they have detected the loss.
_SIGTERM_S = 2.0
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM
_BY_SIGTERM = "was ended by SIGTERM"


class Peers:
    """Watches the other ranks of the job on behalf of one rank.

    Args:
        end: ends the process with the given exit code.
    """

    def __init__(self, end: Callable[[int], None] | None = None) -> None:
        self._end = end or end_process
        self._rank = 0
        self._links: Links | None = None
        self._thread = threading.Thread()
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._news = threading.Condition()
        self._loss: Loss | None = None
        self._printed = False
        self._failed = False
        self._exit_code = 1
        self._terminated = False
        self._deadline: float | None = None

    def watch_world(self) -> None:
        """:meth:`watch` the ranks of the default process group, and delay SIGTERM; call this in the main thread."""
        self.watch(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
        self._outlast_sigterm()

    def watch(self, store: Store, rank: int, num_ranks: int) -> None:
        """Connect to the other ranks and end this process when one of them is lost. A collective call.

        If the connection fails, the job continues and one line per machine reports it.
        """
        if self._links is not None or num_ranks == 1:
            return
        self._rank = rank
        try:
            links = Links.open(store, rank, num_ranks)
        except (OSError, RuntimeError) as error:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                report(f"rank {rank}: no connection to rank 0 ({error}); lost ranks will not be reported here")
            return
        self._links = links
        self._wake = socket.socketpair()
        self._wake[1].setblocking(False)
        links.selector.register(self._wake[0], selectors.EVENT_READ)
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._run, args=(links, self._wake[0]), name="peers", daemon=True)
        self._thread.start()

    def _outlast_sigterm(self) -> None:
        """Delay SIGTERM until it is known whether a rank was lost, unless the job handles the signal itself."""
        if self._wake is not None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            signal.set_wakeup_fd(self._wake[1].fileno(), warn_on_full_buffer=False)

    def explain(self, error: BaseException) -> bool:
        """Whether ``error`` was caused by the loss of another rank; if so, print the message about the loss.

        If not, the caller must print the error and call :meth:`fail`.
        """
        with self._news:
            if self._links is not None and _cause_at_a_peer(error) is not None:
                self._news.wait_for(lambda: self._loss is not None, _NEWS_S)
                if self._loss is not None:
                    self._tell()
                    return True
            self._failed = True
            return False

    def fail(self, error: BaseException) -> None:
        """Announce to the other ranks that this one exits with ``error``; SystemExit with code 0 is a normal exit."""
        if isinstance(error, SystemExit):
            if not error.code:
                return
            self._exit_code = int(error.code) if isinstance(error.code, int) else 1
            how = f"exited with code {self._exit_code}"
        else:
            cause = _cause_at_a_peer(error)
            name = type(cause or error).__name__
            how = f"ended with {name}" if cause is None else f"lost a connection ({name})"
        with self._news:
            self._failed = True
        if self._links is not None and self._loss is None:
            self._links.announce(Loss((self._rank,), how))

    def leave(self) -> None:
        """Announce to the other ranks that this one exits normally, and :meth:`close`.

        It is called at process exit if the caller does not call it. Later losses of other ranks are not detected.
        """
        if self._links is not None and self._loss is None and not self._failed:
            self._links.leave()
            self.close()

    def close(self) -> None:
        """Close the connections without an announcement and restore SIGTERM; call this in the main thread."""
        links, self._links = self._links, None
        if links is None or self._wake is None:
            return
        atexit.unregister(self._at_exit)
        self._hand_sigterm_back()
        with suppress(BlockingIOError):  # the buffer is full, so the thread wakes anyway
            self._wake[1].send(b"\0")
        self._thread.join(_GRACE_S)
        self._let_go(links)

    def _run(self, links: Links, wake: socket.socket) -> None:
        try:
            self._listen(links, wake)
        except Exception as error:  # noqa: BLE001 (after any error, SIGTERM must still end the process)
            if self._links is None:
                return
            report(f"rank {self._rank}: the watch ended with {error!r}; lost ranks will not be reported here")
            while self._links is not None and self._loss is None and not self._terminated:
                if signal.SIGTERM in wake.recv(64):
                    self._hear_sigterm()
            if self._links is not None:
                self._end(self._exit_code if self._loss else _ENDED_BY_SIGTERM)

    def _listen(self, links: Links, wake: socket.socket) -> None:
        while self._deadline is None or time.monotonic() < self._deadline:
            until = min(filter(None, (self._deadline, links.next_expiry)), default=None)
            wait_s = None if until is None else max(0.0, until - time.monotonic())
            ready = [key for key, _ in links.selector.select(wait_s)]
            if any(key.fileobj is wake for key in ready) and signal.SIGTERM in wake.recv(64):
                self._hear_sigterm()
            if self._links is None:
                return
            loss = links.hear([key.data for key in ready if key.fileobj is not wake])
            links.expire()
            if loss is not None and self._loss is None and not self._failed and self._rank not in loss.ranks:
                self._hear_of(loss, links)
        if self._loss is None:
            links.announce(Loss((self._rank,), _BY_SIGTERM))
        with self._news:
            self._tell()
        self._end(self._exit_code if self._loss else _ENDED_BY_SIGTERM)

    def _on_sigterm(self, number: int, _frame: FrameType | None) -> None:
        """Pass the signal to the thread.

        Python writes to the wake-up descriptor at once, so the thread gets the signal even while the main thread waits
        in a collective. This handler repeats it in case other code has replaced the descriptor.
        """
        if self._wake is not None and self._thread.is_alive():
            with suppress(BlockingIOError):
                self._wake[1].send(bytes([number]))
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _handles_sigterm(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._on_sigterm

    def _hand_sigterm_back(self) -> None:
        assert self._wake is not None, "watch was called"
        if self._handles_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        descriptor = signal.set_wakeup_fd(-1)
        if descriptor != self._wake[1].fileno():
            with suppress(OSError, ValueError):  # the descriptor is other code's, which may have closed it
                signal.set_wakeup_fd(descriptor)

    def _hear_sigterm(self) -> None:
        if self._handles_sigterm() and not self._terminated:
            self._terminated = True
            self._deadline = time.monotonic() + (_SIGTERM_S if self._loss is None else 0.0)

    def _hear_of(self, loss: Loss, links: Links) -> None:
        if self._rank == 0:
            links.announce(loss)
        if self._terminated and loss.how == _BY_SIGTERM:
            return  # SIGTERM was sent to all ranks, so this is not a loss
        with self._news:
            self._loss = loss
            self._news.notify_all()
            if loss.how == DIED:
                self._tell()
        self._deadline = time.monotonic() + (0.0 if self._terminated else _GRACE_S)

    def _tell(self) -> None:
        """Print the message about the loss, once, unless this rank reports its own error."""
        if self._loss is not None and not self._printed and not self._failed:
            self._printed = True
            report(f"rank {self._rank}: {self._loss.sentence()}")

    def _at_exit(self) -> None:
        self.leave()
        if self._links is not None and self._loss is not None and not self._failed:
            with self._news:
                self._tell()
            self._end(1)  # a normal exit could wait for the lost rank, for example to close process groups
        self.close()

    def _forget(self) -> None:
        """Close the connections in a forked process, which must not keep those of its parent's rank open."""
        links, self._links = self._links, None
        if links is not None:
            self._hand_sigterm_back()
            self._let_go(links)

    def _let_go(self, links: Links) -> None:
        links.close()
        for end in self._wake or ():
            end.close()
        self._wake = None


def _cause_at_a_peer(error: BaseException) -> BaseException | None:
    """The first error in the chain of ``error`` that a lost rank may have caused."""
    of_a_peer = (
        part for part in _chain(error) if isinstance(part, (ConnectionError, EOFError)) or lost_connection(part)
    )
    return next(of_a_peer, None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, its cause or context, and so on."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        seen.append(following)
        yield following
        following = following.__cause__ or following.__context__

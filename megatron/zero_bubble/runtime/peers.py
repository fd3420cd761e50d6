"""How a rank ends when another one is lost: with a sentence that names it, and within seconds.

A collective that fails says "connection closed by peer" at best, and that peer may be a survivor that gave up first.
One that waits on a GPU may not fail at all. So a thread listens to the links of ``runtime/links.py``. It hears which
rank was lost, the first that rank 0 heard of, prints the sentence, gives the main thread a few seconds to end by
itself, and then ends the process.

A machine that loses power or network closes no connection: only the timeouts of the collectives notice that.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType

import torch.distributed as dist

from megatron.zero_bubble.runtime.links import DIED, Links, Loss, Store
from megatron.zero_bubble.runtime.transport import lost_connection

# How long the main thread has to end by itself, and how long its error waits to hear which rank was lost.
_GRACE_S = 5.0
_NEWS_S = 10.0
# An agent that sees a rank die sends SIGTERM to the others at once, perhaps before they have heard of it.
_SIGTERM_S = 2.0
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM
_BY_SIGTERM = "was ended by SIGTERM"


class Peers:
    """The other ranks of the job, as one rank sees them.

    Args:
        end: ends the process with an exit code.
    """

    def __init__(self, end: Callable[[int], None] | None = None) -> None:
        self._end = end or _end_process
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
        """:meth:`watch` the ranks of the default process group, and outlast SIGTERM; called in the main thread."""
        self.watch(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
        self._outlast_sigterm()

    def watch(self, store: Store, rank: int, num_ranks: int) -> None:
        """Connect to the other ranks, and from now on end when one is lost; every rank calls this at the same time.

        Without a connection the job goes on, and one line per machine says what is missing.
        """
        if self._links is not None or num_ranks == 1:
            return
        self._rank = rank
        try:
            links = Links.open(store, rank, num_ranks)
        except (OSError, RuntimeError) as error:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                _print(f"rank {rank}: no connection to rank 0 ({error}); a rank that is lost will not be named here")
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
        """Let SIGTERM wait until it is known whether a rank was lost, unless the job handles the signal itself."""
        if self._wake is not None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            signal.set_wakeup_fd(self._wake[1].fileno(), warn_on_full_buffer=False)

    def explain(self, error: BaseException) -> bool:
        """Whether ``error`` is the consequence of a rank that was lost, and print the sentence if it is.

        If it is not, the caller prints the error and calls :meth:`fail`.
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
        """Say to the other ranks that this one ends with ``error``; SystemExit with a code of 0 is a normal end."""
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
        """Say to the other ranks that this one ends normally, and :meth:`close`; done at exit where the caller does
        not. Of a rank that is lost later this one hears no more.
        """
        if self._links is not None and self._loss is None and not self._failed:
            self._links.leave()
            self.close()

    def close(self) -> None:
        """Stop listening, without a word; the connections close and SIGTERM is as it was. In the main thread."""
        links, self._links = self._links, None
        if links is None or self._wake is None:
            return
        atexit.unregister(self._at_exit)
        self._hand_sigterm_back()
        with suppress(BlockingIOError):  # there is enough to wake the thread
            self._wake[1].send(b"\0")
        self._thread.join(_GRACE_S)
        self._let_go(links)

    def _run(self, links: Links, wake: socket.socket) -> None:
        try:
            self._listen(links, wake)
        except Exception as error:  # noqa: BLE001 (whatever it is, SIGTERM must still end the process)
            if self._links is None:
                return
            _print(f"rank {self._rank}: the watch ended with {error!r}; a rank that is lost will not be named here")
            while self._links is not None and self._loss is None and not self._terminated:
                if signal.SIGTERM in wake.recv(64):
                    self._hear_sigterm()
            if self._links is not None:
                self._end(self._exit_code if self._loss else _ENDED_BY_SIGTERM)

    def _listen(self, links: Links, wake: socket.socket) -> None:
        while self._deadline is None or time.monotonic() < self._deadline:
            wait_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            ready = [key for key, _ in links.selector.select(wait_s)]
            if any(key.fileobj is wake for key in ready) and signal.SIGTERM in wake.recv(64):
                self._hear_sigterm()
            if self._links is None:
                return
            loss = links.hear([key.data for key in ready if key.fileobj is not wake])
            if loss is not None and self._loss is None and not self._failed and self._rank not in loss.ranks:
                self._hear_of(loss, links)
        if self._loss is None:
            links.announce(Loss((self._rank,), _BY_SIGTERM))
        with self._news:
            self._tell()
        self._end(self._exit_code if self._loss else _ENDED_BY_SIGTERM)

    def _on_sigterm(self, number: int, _frame: FrameType | None) -> None:
        """Leave it to the thread. Python has woken the thread before, which runs while the main thread waits in a
        collective, unless other code has taken Python's wake-up descriptor.
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
        assert self._wake is not None, "it watches"
        if self._handles_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        descriptor = signal.set_wakeup_fd(-1)
        if descriptor != self._wake[1].fileno():
            with suppress(OSError, ValueError):  # of other code, which may have closed it
                signal.set_wakeup_fd(descriptor)

    def _hear_sigterm(self) -> None:
        if self._handles_sigterm() and not self._terminated:
            self._terminated = True
            self._deadline = time.monotonic() + (_SIGTERM_S if self._loss is None else 0.0)

    def _hear_of(self, loss: Loss, links: Links) -> None:
        if self._rank == 0:
            links.announce(loss)
        if self._terminated and loss.how == _BY_SIGTERM:
            return  # all ranks are asked to end: this is no loss
        with self._news:
            self._loss = loss
            self._news.notify_all()
            if loss.how == DIED:
                self._tell()
        self._deadline = time.monotonic() + (0.0 if self._terminated else _GRACE_S)

    def _tell(self) -> None:
        """Print the sentence, once, unless this rank reports an error of its own."""
        if self._loss is not None and not self._printed and not self._failed:
            self._printed = True
            _print(f"rank {self._rank}: {self._loss.sentence()}")

    def _at_exit(self) -> None:
        self.leave()
        if self._links is not None and self._loss is not None and not self._failed:
            with self._news:
                self._tell()
            self._end(1)  # what is left, the groups' connections first of all, may wait for the rank that was lost
        self.close()

    def _forget(self) -> None:
        """In a forked process, which is none of the ranks: it must not hold their connections open."""
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
    """The first error in the chain of ``error`` that a rank that is lost may have caused."""
    of_a_peer = (
        part for part in _chain(error) if isinstance(part, (ConnectionError, EOFError)) or lost_connection(part)
    )
    return next(of_a_peer, None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, what it was raised from, and so on."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        seen.append(following)
        yield following
        following = following.__cause__ or following.__context__


def _print(line: str) -> None:
    # In one piece, since other ranks print too; and not to sys.stderr, which torch.distributed holds back in an error.
    print(f"zero-bubble: {line}\n", end="", file=sys.__stderr__, flush=True)


def _end_process(code: int) -> None:
    """End without the interpreter's farewells, but with the main thread's output and without its children."""
    for child in multiprocessing.active_children():
        child.kill()
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # which waits where the main thread is in a print
    flush.start()
    flush.join(1.0)
    os._exit(code)

"""Connections from every rank to rank 0, used to find out which rank was lost first.

The operating system closes the connections of a process when it ends, for whatever reason. The protocol is lines of
text: ``hello TOKEN RANK`` opens a connection, ``left`` announces a normal exit, and ``lost RANKS HOW`` announces an
exit with an error, or, from rank 0, the loss of other ranks. If a connection closes without ``left`` or ``lost``, its
rank has died.
"""

from __future__ import annotations

import os
import resource
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

DIED = "died"
_KEY = "zero-bubble/peers"
_CONNECT_TIMEOUT_S = 10.0
# Ranks connect at different times, because they start at different times; one that is later is not watched.
_LISTEN_TIMEOUT_S = 600.0
_SEND_TIMEOUT_S = 5.0
# Firewalls drop the state of connections that are idle for some minutes, and reset them later.
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 30}
# Open files reserved for the rest of rank 0's process, in addition to one connection per rank.
_OTHER_FILES = 1024
_LONGEST_HELLO = 4096
# Connections without a hello, in addition to one per rank that has not connected yet.
_MOST_STRANGERS = 64


@dataclass(frozen=True)
class Loss:
    """Lost ranks and the reason, a verb phrase such as ``died``."""

    ranks: tuple[int, ...]
    how: str = DIED

    def sentence(self) -> str:
        """The message that a surviving rank prints."""
        several = len(self.ranks) > 1
        names = ", ".join(map(str, self.ranks[:-1])) + " and " * several + str(self.ranks[-1])
        who = f"{'ranks' if several else 'rank'} {names}"
        return (
            f"stopped because {who} {self.how}; look at the output of {who} first, then start the job again from its "
            "last checkpoint"
        )

    def announcement(self) -> str:
        """The protocol line sent by rank 0, or by a rank that exits with an error."""
        return f"lost {','.join(map(str, self.ranks))} {self.how}"


class Store(Protocol):
    """The methods of torch.distributed's store that are used here."""

    def set(self, key: str, value: str) -> Any: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...


@dataclass
class _Line:
    """A connection that carries lines of text.

    Attributes:
        rank: the rank at the other end, once it is known, and until it leaves.
        hello_by: the time by which its hello must arrive; None if it has arrived, or none is expected.
    """

    socket: socket.socket
    rank: int | None = None
    hello_by: float | None = None
    _rest: bytes = b""

    def say(self, text: str) -> None:
        with suppress(OSError):  # a closed connection is detected when it is read
            self.socket.sendall(f"{text}\n".encode())

    def hear(self) -> list[str] | None:
        """The received lines; None if the process at the other end has ended."""
        try:
            received = self.socket.recv(4096)
        except ConnectionError:
            received = b""
        except OSError:
            return ["left"]  # a network error does not mean that the other process has ended
        if not received:
            return None
        *lines, self._rest = (self._rest + received).split(b"\n")
        if self.rank is None and len(self._rest) > _LONGEST_HELLO:
            return None
        return [line.decode(errors="replace") for line in lines]


@dataclass
class Links:
    """The connections of one rank: rank 0 is connected to all others, every other rank to rank 0.

    Attributes:
        selector: becomes ready when there is something to read for :meth:`hear`.
    """

    rank: int
    token: str = ""
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _lines: list[_Line] = field(default_factory=list)
    _listener: socket.socket | None = None
    _listens_until: float = 0.0
    _num_awaited: int = 0
    _announced: Loss | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, store: Store, rank: int, num_ranks: int) -> Links:
        """Connect the ranks: rank 0 listens and publishes its address in ``store`` for the others.

        Every rank must call this the same number of times; each round of calls makes new connections.

        Raises:
            OSError, RuntimeError: the connection fails, or the store does not answer.
        """
        key = f"{_KEY}/{store.add(f'{_KEY}/opened by {rank}', 1)}"
        if rank > 0:
            return cls._to_rank_0(rank, store.get(key).decode())
        links = cls(rank, secrets.token_hex(8))
        try:
            _allow_open_files(num_ranks + _OTHER_FILES)
            links._listen(num_ranks)
        except OSError:
            store.set(key, "")
            raise
        store.set(key, f"{socket.gethostname()} {links.port} {links.token}")
        return links

    @classmethod
    def _to_rank_0(cls, rank: int, address: str) -> Links:
        if not address:
            raise OSError("rank 0 cannot listen")
        host, port, token = address.split()
        connected = _connect((os.environ.get("MASTER_ADDR") or host, host), int(port))
        links = cls(rank, token)
        links._add(connected, 0).say(f"hello {token} {rank}")
        return links

    def _listen(self, num_ranks: int) -> None:
        if socket.has_dualstack_ipv6():
            address: dict[str, Any] = {"family": socket.AF_INET6, "dualstack_ipv6": True}
        else:
            address = {}
        self._listener = socket.create_server(("", 0), backlog=num_ranks, **address)
        self._listens_until = time.monotonic() + _LISTEN_TIMEOUT_S
        self._num_awaited = num_ranks - 1
        self.selector.register(self._listener, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        assert self._listener is not None, "only rank 0 listens, until all ranks are connected"
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        if self._listener is not None:
            with suppress(OSError):  # the peer may have closed the connection already
                self._add(self._listener.accept()[0]).hello_by = time.monotonic() + _CONNECT_TIMEOUT_S

    def _strangers(self) -> list[_Line]:
        """The connections without a hello, the first one first."""
        return [line for line in self._lines if line.hello_by is not None]

    @property
    def next_expiry(self) -> float | None:
        """When :meth:`expire` must be called, in seconds of the monotonic clock; None if nothing can expire."""
        times = [line.hello_by for line in self._strangers()]
        return min(filter(None, (*times, None if self._listener is None else self._listens_until)), default=None)

    def expire(self) -> None:
        """Close connections whose hello is late, the first ones if they are too many, and stop listening in time."""
        now, strangers = time.monotonic(), self._strangers()
        surplus = len(strangers) - self._num_awaited - _MOST_STRANGERS  # a rank sends its hello at once
        for number, line in enumerate(strangers):
            if number < surplus or (line.hello_by is not None and line.hello_by <= now):
                self._drop(line)
        if self._listens_until <= now:
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self.selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _add(self, connected: socket.socket, rank: int | None = None) -> _Line:
        connected.settimeout(_SEND_TIMEOUT_S)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in _KEEPALIVE.items():
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        line = _Line(connected, rank)
        with self._lock:
            self._lines.append(line)
        self.selector.register(connected, selectors.EVENT_READ, line)
        return line

    def _drop(self, line: _Line) -> None:
        self.selector.unregister(line.socket)
        with self._lock:
            self._lines.remove(line)
        line.socket.close()

    def say(self, text: str) -> None:
        """Send a line to rank 0, or from rank 0 to all ranks; can be called from any thread."""
        with self._lock:
            for line in self._lines:
                if line.rank is not None:
                    line.say(text)

    def leave(self) -> None:
        """Announce that this rank exits normally."""
        self.say("left")

    def announce(self, loss: Loss) -> None:
        """Announce the loss of ranks, which may include this one."""
        self._announced = loss
        self.say(loss.announcement())

    def hear(self, ready: Sequence[_Line | None]) -> Loss | None:
        """Read the ready connections and return a loss, if any. Ranks that died take precedence over announcements."""
        died: set[int] = set()
        announced: list[Loss] = []
        for line in ready:
            if line is None:
                self._accept()
                continue
            heard = line.hear()
            if heard is None:
                died |= set() if line.rank is None else {line.rank}
                self._drop(line)
                continue
            for text in heard:
                if line.rank is None and not self._welcome(line, text):
                    self._drop(line)
                    break
                loss = self._understand(line, text)
                announced += [] if loss is None else [loss]
        return Loss(tuple(sorted(died))) if died else next(iter(announced), None)

    def _welcome(self, line: _Line, text: str) -> bool:
        """Whether ``text`` is a valid hello, which identifies the rank. A rank that has left must send nothing more."""
        kind, token, rank = (*text.split(" "), "", "")[:3]
        if kind != "hello" or not secrets.compare_digest(token.encode(), self.token.encode()):
            return False
        line.rank, line.hello_by = int(rank), None
        if self._announced is not None:  # the rank connected after the announcement
            line.say(self._announced.announcement())
        self._num_awaited -= 1
        if self._num_awaited == 0:
            self._stop_listening()
        return True

    def _understand(self, line: _Line, text: str) -> Loss | None:
        kind, _, rest = text.partition(" ")
        ranks, _, how = rest.partition(" ")
        loss = Loss(tuple(map(int, ranks.split(","))), how) if kind == "lost" else None
        if kind == "left" or (loss is not None and line.rank in loss.ranks):
            line.rank = None  # the closing of this connection is expected from now on
        return loss

    def close(self) -> None:
        """Close the connections of this process without announcing anything."""
        for line in self._lines:
            line.socket.close()
        if self._listener is not None:
            self._listener.close()
        self.selector.close()


def _connect(hosts: Sequence[str], port: int) -> socket.socket:
    """Connect to the first host that accepts; raises the OSError of the last host if none does."""
    *first, last = dict.fromkeys(hosts)
    for host in first:
        with suppress(OSError):
            return socket.create_connection((host, port), _CONNECT_TIMEOUT_S)
    return socket.create_connection((last, port), _CONNECT_TIMEOUT_S)


def _allow_open_files(number: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and hard < number:
        raise OSError(
            f"rank 0 needs {number} open files, but the hard limit is {hard}; "
            "ask an administrator or the cluster's scheduler for a higher one"
        )
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))

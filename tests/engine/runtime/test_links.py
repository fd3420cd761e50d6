"""Tests of how ranks learn over their connections which rank is lost."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from megatron.zero_bubble.engine.runtime import links as links_module
from megatron.zero_bubble.engine.runtime.links import Links, Loss


class DictStore(dict[str, str]):
    """An in-process stand-in for a store of torch.distributed."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()

    def add(self, key: str, amount: int) -> int:
        self[key] = str(int(super().get(key, "0")) + amount)
        return int(self[key])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> DictStore:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return DictStore()


@pytest.fixture
def three(store: DictStore) -> Iterator[list[Links]]:
    """The connected links of three ranks."""
    links = [Links.open(store, rank, 3) for rank in range(3)]
    listen(links[0])
    yield links
    for link in links:
        link.close()


def listen(links: Links, wait_s: float = 0.1) -> Loss | None:
    """Process messages until none arrives for ``wait_s``; return the first loss."""
    loss = None
    while ready := [key.data for key, _ in links.selector.select(wait_s)]:
        heard = links.hear(ready)
        loss = loss or heard
    return loss


def test_closed_connection_means_died(three: list[Links]) -> None:
    three[2].close()
    assert listen(three[0]) == Loss((2,), "died")
    three[0].announce(Loss((2,)))
    assert listen(three[1]) == Loss((2,), "died")


def test_death_of_rank_0_is_seen_by_all_ranks(three: list[Links]) -> None:
    three[0].close()
    assert [listen(links) for links in three[1:]] == [Loss((0,)), Loss((0,))]


def test_rank_can_close_after_leaving(three: list[Links]) -> None:
    three[1].leave()
    three[1].close()
    assert listen(three[0]) is None
    three[0].leave()
    three[0].close()
    assert listen(three[2]) is None


def test_announced_error_is_the_reason_of_the_loss(three: list[Links]) -> None:
    three[1].announce(Loss((1,), "ended with ValueError"))
    three[1].close()
    assert listen(three[0]) == Loss((1,), "ended with ValueError")


def test_death_takes_precedence_over_announcement(three: list[Links]) -> None:
    """A rank that announces its end may only have noticed another rank's death first."""
    three[1].announce(Loss((1,), "lost a connection (RuntimeError)"))
    three[2].close()
    ready = [key.data for key, _ in three[0].selector.select(1)]
    assert len(ready) == 2
    assert three[0].hear(ready) == Loss((2,), "died")


def test_simultaneous_deaths_are_all_named(three: list[Links]) -> None:
    for links in three[1:]:
        links.close()
    loss = listen(three[0])
    assert loss is not None
    assert loss.sentence() == (
        "stopped because ranks 1 and 2 died; look at the output of ranks 1 and 2 first, then start the job again from "
        "its last checkpoint"
    )


def test_late_connection_receives_earlier_loss(store: DictStore) -> None:
    first, second = Links.open(store, 0, 3), Links.open(store, 1, 3)
    listen(first)
    second.close()
    loss = listen(first)
    assert loss is not None
    first.announce(loss)
    third = Links.open(store, 2, 3)
    listen(first)
    assert listen(third) == Loss((1,), "died")


@pytest.mark.parametrize("line", [b"hello wrong 1\n", b"hello\n", b"lost 1 died\n", b"\xff\n", b"x" * 5000])
def test_unknown_client_is_disconnected(store: DictStore, line: bytes) -> None:
    first, second = Links.open(store, 0, 3), Links.open(store, 1, 3)
    with socket.create_connection(("127.0.0.1", first.port), 5) as stranger:
        stranger.sendall(line)
        assert listen(first) is None
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "the connection must be closed"
    first.announce(Loss((2,)))
    assert listen(second) == Loss((2,))
    for links in (first, second):
        links.close()


def test_connections_without_a_hello_are_closed_in_time(store: DictStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(links_module.time, "monotonic", lambda: now)
    first, second = Links.open(store, 0, 3), Links.open(store, 1, 3)
    with socket.create_connection(("127.0.0.1", first.port), 5) as stranger:
        listen(first)
        second.leave()  # and is not a stranger, although its rank is no longer known
        listen(first)
        assert first.next_expiry == now + links_module._CONNECT_TIMEOUT_S
        first.expire()
        assert len(first._lines) == 2
        now += links_module._CONNECT_TIMEOUT_S
        first.expire()
        assert stranger.recv(1) == b"", "the connection must be closed"
    assert len(first._lines) == 1
    for links in (first, second):
        links.close()


def test_rank_0_stops_listening_for_a_rank_that_does_not_connect(
    store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(links_module.time, "monotonic", lambda: now)
    first, second = Links.open(store, 0, 3), Links.open(store, 1, 3)
    port = first.port
    listen(first)
    assert first.next_expiry == now + links_module._LISTEN_TIMEOUT_S
    now += links_module._LISTEN_TIMEOUT_S
    first.expire()
    assert first.next_expiry is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
    second.close()
    assert listen(first) == Loss((1,)), "ranks that are connected are still watched"
    first.close()


def test_number_of_connections_without_a_hello_is_limited(store: DictStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "_MOST_STRANGERS", 2)
    first = Links.open(store, 0, 2)
    with ExitStack() as opened:
        strangers = []
        for _ in range(5):
            strangers.append(opened.enter_context(socket.create_connection(("127.0.0.1", first.port), 5)))
            listen(first, 0.01)
        first.expire()
        assert len(first._lines) == 3, "one for the rank that has not connected, and two more"
        assert [stranger.recv(1) for stranger in strangers[:2]] == [b"", b""]
        second = Links.open(store, 1, 2)
        listen(first)
        second.close()
        assert listen(first) == Loss((1,)), "a rank connects in spite of the strangers"
    first.close()


def test_rank_0_stops_listening_when_all_are_connected(store: DictStore) -> None:
    first = Links.open(store, 0, 2)
    port = first.port
    second = Links.open(store, 1, 2)
    listen(first)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
    for links in (first, second):
        links.close()


def test_connections_use_tcp_keepalive(three: list[Links]) -> None:
    for links in three:
        for line in links._lines:
            assert line.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert line.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
            assert line.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 30


def test_rank_0_is_reachable_by_its_host_name(store: DictStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """MASTER_ADDR may be an address of the store only."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    first = Links.open(store, 0, 2)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    second = Links.open(store, 1, 2)
    second.close()
    assert listen(first) == Loss((1,))
    first.close()


def test_ranks_can_reconnect_with_the_same_store(store: DictStore, three: list[Links]) -> None:
    for links in three:
        links.close()
    again = [Links.open(store, rank, 3) for rank in range(3)]
    listen(again[0])
    again[2].close()
    assert listen(again[0]) == Loss((2,))
    for links in again[:2]:
        links.close()


@pytest.mark.parametrize(("soft", "hard", "raised"), [(256, 4096, 1026), (4096, 4096, None), (-1, -1, None)])
def test_rank_0_raises_its_limit_of_open_files(
    store: DictStore, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    Links.open(store, 0, 2).close()
    assert asked == ([] if raised is None else [(raised, hard)])


def test_rank_0_rejects_too_low_limit_of_open_files(store: DictStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with pytest.raises(OSError, match="rank 0 needs 1026 open files, but the hard limit is 1024;"):
        Links.open(store, 0, 2)
    with pytest.raises(OSError, match="rank 0 cannot listen"):
        Links.open(store, 1, 2)


def test_ranks_fail_at_once_if_rank_0_cannot_listen(store: DictStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no sockets here")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(OSError, match="no sockets here"):
        Links.open(store, 0, 2)
    with pytest.raises(OSError, match="rank 0 cannot listen"):
        Links.open(store, 1, 2)

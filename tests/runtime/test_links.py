"""Who is lost, as rank 0 and the others learn it over their connections."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from megatron.zero_bubble.runtime.links import Links, Loss


class Shelf(dict[str, str]):
    """A store of torch.distributed in one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return Shelf()


@pytest.fixture
def three(store: Shelf) -> Iterator[list[Links]]:
    """The links of three ranks, all connected."""
    links = [Links.open(store, rank, 3) for rank in range(3)]
    listen(links[0])
    yield links
    for link in links:
        link.close()


def listen(links: Links, wait_s: float = 0.1) -> Loss | None:
    """What it hears until nothing more comes."""
    loss = None
    while ready := [key.data for key, _ in links.selector.select(wait_s)]:
        heard = links.hear(ready)
        loss = loss or heard
    return loss


def test_who_dies_without_a_word_is_lost(three: list[Links]) -> None:
    three[2].close()
    assert listen(three[0]) == Loss((2,), "died")
    three[0].announce(Loss((2,)))
    assert listen(three[1]) == Loss((2,), "died")


def test_rank_0_is_seen_by_the_others(three: list[Links]) -> None:
    three[0].close()
    assert [listen(links) for links in three[1:]] == [Loss((0,)), Loss((0,))]


def test_a_rank_that_has_left_may_close(three: list[Links]) -> None:
    three[1].leave()
    three[1].close()
    assert listen(three[0]) is None
    three[0].leave()
    three[0].close()
    assert listen(three[2]) is None


def test_how_a_rank_ends_with_an_error(three: list[Links]) -> None:
    three[1].announce(Loss((1,), "ended with ValueError"))
    three[1].close()
    assert listen(three[0]) == Loss((1,), "ended with ValueError")


def test_a_death_comes_before_an_announcement(three: list[Links]) -> None:
    """A rank that announces its end may have been the first to notice."""
    three[1].announce(Loss((1,), "waited in vain for another rank"))
    three[2].close()
    ready = [key.data for key, _ in three[0].selector.select(1)]
    assert len(ready) == 2
    assert three[0].hear(ready) == Loss((2,), "died")


def test_two_that_die_at_once_are_both_named(three: list[Links]) -> None:
    for links in three[1:]:
        links.close()
    loss = listen(three[0])
    assert loss is not None
    assert loss.sentence() == (
        "stopped because ranks 1 and 2 died; look at the output of ranks 1 and 2 first, then start the job again from "
        "its last checkpoint"
    )


def test_a_rank_that_connects_late_hears_of_it(store: Shelf) -> None:
    first, second = Links.open(store, 0, 3), Links.open(store, 1, 3)
    listen(first)
    second.close()
    loss = listen(first)
    assert loss is not None
    first.announce(loss)
    third = Links.open(store, 2, 3)
    listen(first)
    assert listen(third) == Loss((1,), "died")


@pytest.mark.parametrize("line", [b"hello wrong 1\n", b"lost 1 died\n", b"\xff\n"])
def test_a_stranger_is_no_rank(store: Shelf, three: list[Links], line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", three[0].port)) as stranger:
        stranger.sendall(line)
        assert listen(three[0]) is None
    assert listen(three[0]) is None
    three[0].announce(Loss((1,)))
    assert listen(three[2]) == Loss((1,))


def test_without_a_way_to_listen_no_rank_waits(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no sockets here")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(OSError, match="no sockets here"):
        Links.open(store, 0, 2)
    with pytest.raises(OSError, match="rank 0 cannot listen"):
        Links.open(store, 1, 2)


def test_more_ranks_than_open_files_do_not_keep_rank_0_busy(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Links.open(store, 0, 2)

    def refuse(_listener: socket.socket) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket.socket, "accept", refuse)
    second = Links.open(store, 1, 2)
    first.hear([key.data for key, _ in first.selector.select(1)])
    assert first.selector.select(0.1) == [], "the listener is not asked again"
    for links in (first, second):
        links.close()

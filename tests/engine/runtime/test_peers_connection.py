"""Tests of how a rank starts to watch the others, and of strangers that connect to it."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from tests.engine.runtime.test_links import DictStore
from tests.engine.runtime.test_peers import wait_until


class UnreachableStore:
    """A store whose server is unreachable."""

    def add(self, *_: object) -> int:
        raise dist.DistNetworkError("connection reset")

    get = add


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("3", 0)])
def test_job_continues_without_a_connection(monkeypatch: pytest.MonkeyPatch, local_rank: str, lines: int) -> None:
    """One rank per machine prints a line."""
    from megatron.zero_bubble.engine.runtime import peers

    printed: list[str] = []
    monkeypatch.setattr(peers, "report", printed.append)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    peers.Peers().watch(UnreachableStore(), 8, 16)  # type: ignore[arg-type]
    assert (
        printed == ["rank 8: no connection to rank 0 (connection reset); lost ranks will not be reported here"][:lines]
    )


def test_the_watch_closes_connections_without_a_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.zero_bubble.engine.runtime import links
    from megatron.zero_bubble.engine.runtime.peers import Peers

    monkeypatch.setattr(links, "_CONNECT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(links, "_LISTEN_TIMEOUT_S", 0.1)
    peers = Peers(lambda code: None)
    peers.watch(DictStore(), 0, 3)
    try:
        assert peers._links is not None
        port = peers._links.port
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            stranger.settimeout(20)
            assert stranger.recv(1) == b""
        wait_until(lambda: peers._links is not None and peers._links.next_expiry is None)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
    finally:
        peers.close()

"""How a rank ends when another one is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.ranks import RankPool

STOPPED = (
    "stopped because rank {0} {1}; look at the output of rank {0} first, then start the job again from its last "
    "checkpoint"
)


class Watching:
    """``Peers`` of a rank of the pool, which must not end: what it would have printed, and its exit code."""

    def __init__(self, rank: int) -> None:
        from megatron.zero_bubble.runtime.peers import Peers

        self.rank = rank
        self.printed: list[str] = []
        self.codes: list[int] = []
        self.peers = Peers(self.codes.append)

    def ends(self) -> tuple[list[str], list[int]]:
        deadline = time.monotonic() + 10
        while not self.codes and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.printed, self.codes


@contextmanager
def watching(rank: int, grace_s: float = 0.2) -> Iterator[Watching]:
    from megatron.zero_bubble.runtime import peers

    watch = Watching(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setattr(peers, "_print", watch.printed.append)
        patch.setattr(peers, "_GRACE_S", grace_s)
        patch.setattr(peers, "_SIGTERM_S", 0.5)
        patch.setattr(peers, "_NEWS_S", 2.0)
        try:
            watch.peers.watch_world()
            dist.barrier()
            time.sleep(0.2)  # rank 0 hears who is who
            yield watch
            dist.barrier()
        finally:
            watch.peers._forget()


def die(watch: Watching) -> None:
    """As a process that is killed: its connections close, and nothing is said."""
    links = watch.peers._links
    assert links is not None
    for line in links._lines:
        line.socket.shutdown(2)
    watch.peers._failed = True  # it hears and says nothing more


def one_dies(rank: int, lost: int) -> tuple[list[str], list[int]]:
    with watching(rank) as watch:
        if rank == lost:
            die(watch)
            return [], []
        return watch.ends()


@pytest.mark.parametrize("lost", [0, 2])
def test_every_other_rank_names_it_and_ends(ranks: RankPool, lost: int) -> None:
    """Nothing has failed on them: the main thread may wait for ever."""
    ended = ranks.run(3, one_dies, lost)
    for rank in {0, 1, 2} - {lost}:
        assert ended[rank] == ([f"rank {rank}: {STOPPED.format(lost, 'died')}"], [1])


def one_after_the_other(rank: int) -> tuple[bool, list[str]]:
    with watching(rank, grace_s=5) as watch:
        if rank > 0:
            time.sleep(0.0 if rank == 2 else 0.5)
            die(watch)  # rank 1 because rank 2 did
            dist.barrier()
            return True, []
        dist.barrier()
        explained = watch.peers.explain(RuntimeError("[pair.cc:1] Connection closed by peer [::1]:1"))
        return explained, watch.printed


def test_the_first_is_named_not_the_survivor_that_ended_next(ranks: RankPool) -> None:
    assert ranks.run(3, one_after_the_other)[0] == (True, [f"rank 0: {STOPPED.format(2, 'died')}"])


def own_error(rank: int) -> tuple[bool, list[str], list[int]]:
    with watching(rank) as watch:
        if rank == 1:
            error = ValueError("of its own")
            explained = watch.peers.explain(error)
            watch.peers.fail(error)
            time.sleep(1)
            return explained, watch.printed, watch.codes
        return True, *watch.ends()


def test_an_error_of_its_own_is_the_callers_to_print(ranks: RankPool) -> None:
    first, second, third = ranks.run(3, own_error)
    assert second == (False, [], [])
    for rank, (_, *ended) in ((0, first), (2, third)):
        assert ended == [[f"rank {rank}: {STOPPED.format(1, 'ended with ValueError')}"], [1]]


def no_news(rank: int) -> tuple[bool, bool]:
    with watching(rank) as watch:
        wrapped = KeyError("x")
        wrapped.__cause__ = ConnectionResetError()
        explained = watch.peers.explain(wrapped), watch.peers.explain(KeyError("x"))
        dist.barrier()
        return explained


def test_without_a_lost_rank_nothing_is_explained(ranks: RankPool) -> None:
    assert ranks.run(2, no_news) == [(False, False)] * 2


def terminated(rank: int, loses: bool) -> tuple[list[str], list[int]]:
    with watching(rank, grace_s=30) as watch:
        if rank == 2:
            if loses:
                time.sleep(0.2)
                die(watch)
                return [], []
            return [], []
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if rank == 1 or loses:
            return watch.ends() if rank == 1 else ([], [])
        time.sleep(1.0)
        return watch.printed, [watch.peers._loss.ranks[0]] if watch.peers._loss else []


def test_sigterm_waits_for_news_of_a_lost_rank(ranks: RankPool) -> None:
    """An agent may see a rank die, and end the others, before they have heard of it."""
    _, second, _ = ranks.run(3, terminated, True)
    assert second == ([f"rank 1: {STOPPED.format(2, 'died')}"], [1])


def test_sigterm_alone_ends_the_process(ranks: RankPool) -> None:
    first, second, _ = ranks.run(3, terminated, False)
    assert second == ([], [128 + signal.SIGTERM])
    assert first[1] == [1], "rank 0 has heard which rank has ended"


def forks(rank: int) -> Any:
    with watching(rank) as watch:
        links = watch.peers._links
        assert links is not None
        child = os.fork()
        if child == 0:
            closed = all(line.socket.fileno() == -1 for line in links._lines)
            default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            os._exit(0 if closed and default and watch.peers._links is None else 1)
        status = os.waitpid(child, 0)[1]
        watch.peers.leave()
        dist.barrier()
        return status, watch.printed


def test_a_forked_process_does_not_hold_the_connections(ranks: RankPool) -> None:
    """A data loader or a checkpoint writer outlives a rank that is killed, which must be noticed all the same."""
    assert ranks.run(2, forks) == [(0, [])] * 2

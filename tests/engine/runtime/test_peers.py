"""Tests of how a rank ends when another rank is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.ranks import RankPool

STOPPED = (
    "stopped because rank {0} {1}; look at the output of rank {0} first, then start the job again from its last "
    "checkpoint"
)


def wait_until(true: Callable[[], bool], limit_s: float = 20) -> None:
    """Wait until the condition is true or the time limit is reached."""
    deadline = time.monotonic() + limit_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)


class Watching:
    """``Peers`` on a pool rank, which must not exit: records output and exit codes instead."""

    def __init__(self, rank: int) -> None:
        from megatron.zero_bubble.engine.runtime.peers import Peers

        self.rank = rank
        self.printed: list[str] = []
        self.codes: list[int] = []
        self.peers = Peers(self.codes.append)

    def is_connected(self) -> bool:
        """Whether the rank behind each connection is known."""
        links = self.peers._links
        assert links is not None
        num_known = sum(line.rank is not None for line in links._lines)
        return num_known == (dist.get_world_size() - 1 if self.rank == 0 else 1)

    def wait_for_loss(self) -> Any:
        """Wait for the report of a loss; return the lost ranks."""
        wait_until(lambda: self.peers._loss is not None)
        return self.peers._loss and self.peers._loss.ranks

    def wait_for_exit(self) -> tuple[list[str], list[int]]:
        wait_until(lambda: bool(self.codes))
        return self.printed, self.codes


@contextmanager
def watching(rank: int, grace_s: float = 0.2, sigterm_s: float = 0.5) -> Iterator[Watching]:
    from megatron.zero_bubble.engine.runtime import peers

    watch = Watching(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setattr(peers, "report", watch.printed.append)
        patch.setattr(peers, "_GRACE_S", grace_s)
        patch.setattr(peers, "_SIGTERM_S", sigterm_s)
        patch.setattr(peers, "_NEWS_S", 2.0)
        try:
            watch.peers.watch_world()
            dist.barrier()
            wait_until(watch.is_connected)
            dist.barrier()
            yield watch
            dist.barrier()
        finally:
            watch.peers.close()


def die(watch: Watching) -> None:
    """Imitate a killed process: close its connections without a message."""
    links = watch.peers._links
    assert links is not None
    watch.peers._failed = True  # it neither reads nor sends any more
    for line in [*links._lines]:  # the thread drops them one by one
        line.socket.shutdown(2)


def one_dies(rank: int, lost: int) -> tuple[list[str], list[int]]:
    with watching(rank) as watch:
        if rank == lost:
            die(watch)
            return [], []
        return watch.wait_for_exit()


@pytest.mark.parametrize("lost", [0, 2])
def test_every_other_rank_names_the_lost_rank_and_exits(ranks: RankPool, lost: int) -> None:
    """Nothing has failed on the other ranks, whose main threads may wait forever."""
    ended = ranks.run(3, one_dies, lost)
    for rank in {0, 1, 2} - {lost}:
        assert ended[rank] == ([f"rank {rank}: {STOPPED.format(lost, 'died')}"], [1])


def one_after_the_other(rank: int) -> tuple[bool, list[str]]:
    with watching(rank, grace_s=5) as watch:
        if rank > 0:
            time.sleep(0.0 if rank == 2 else 0.5)
            die(watch)  # rank 1 dies because rank 2 did
            dist.barrier()
            return True, []
        dist.barrier()
        explained = watch.peers.explain(RuntimeError("[pair.cc:1] Connection closed by peer [::1]:1"))
        return explained, watch.printed


def test_first_lost_rank_is_named_instead_of_later_ones(ranks: RankPool) -> None:
    assert ranks.run(3, one_after_the_other)[0] == (True, [f"rank 0: {STOPPED.format(2, 'died')}"])


def own_error(rank: int) -> tuple[bool, list[str], list[int]]:
    with watching(rank) as watch:
        if rank == 1:
            error = ValueError("of its own")
            explained = watch.peers.explain(error)
            watch.peers.fail(error)
            time.sleep(1)
            return explained, watch.printed, watch.codes
        return True, *watch.wait_for_exit()


def test_ranks_own_error_is_left_to_the_caller_to_print(ranks: RankPool) -> None:
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


def test_explain_is_false_without_a_lost_rank(ranks: RankPool) -> None:
    assert ranks.run(2, no_news) == [(False, False)] * 2


def terminated_with_a_loss(rank: int) -> tuple[list[str], list[int]]:
    with watching(rank, grace_s=30, sigterm_s=20) as watch:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: watch.peers._terminated)
        dist.barrier()
        if rank == 2:
            die(watch)
        return watch.wait_for_exit() if rank == 1 else ([], [])


def test_sigterm_waits_for_news_of_a_lost_rank(ranks: RankPool) -> None:
    """An agent may see a rank die and terminate the others before they know of the loss."""
    _, second, _ = ranks.run(3, terminated_with_a_loss)
    assert second == ([f"rank 1: {STOPPED.format(2, 'died')}"], [1])


def terminated(rank: int, hinder: Callable[[Watching], None] | None) -> tuple[list[str], Any]:
    with watching(rank, grace_s=30) as watch:
        if rank == 1:
            if hinder is not None:
                hinder(watch)
            os.kill(os.getpid(), signal.SIGTERM)
            return watch.wait_for_exit()
        return watch.printed, watch.wait_for_loss()


def take_the_wakeup_descriptor(_watch: Watching) -> None:
    """Reset the descriptor as asyncio does when its last signal handler is removed."""
    signal.set_wakeup_fd(-1)


@pytest.mark.parametrize("hinder", [None, take_the_wakeup_descriptor])
def test_sigterm_without_a_loss_ends_the_process(ranks: RankPool, hinder: Callable[[Watching], None] | None) -> None:
    first, second, third = ranks.run(3, terminated, hinder)
    assert second == ([], [128 + signal.SIGTERM])
    assert first[1] == third[1] == (1,), "the other ranks must learn which rank has ended"


def terminated_without_links(rank: int) -> tuple[int, list[int]]:
    with watching(rank) as watch:
        links = watch.peers._links
        assert links is not None

        def fail(_ready: object) -> None:
            raise ValueError("on purpose")

        links.hear = fail  # type: ignore[method-assign, assignment]
        dist.barrier()
        if rank == 1:
            links.say("wake up")
        if rank == 0:
            wait_until(lambda: bool(watch.printed))
            os.kill(os.getpid(), signal.SIGTERM)
            watch.wait_for_exit()
        return len(watch.printed), watch.codes


def test_sigterm_ends_a_process_whose_watch_thread_failed(ranks: RankPool) -> None:
    assert ranks.run(2, terminated_without_links) == [(1, [128 + signal.SIGTERM]), (0, [])]


def sigterm_after_the_thread(rank: int) -> int:
    with watching(rank) as watch:
        handler = signal.getsignal(signal.SIGTERM)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, handler)  # like code that saves and restores a handler
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        watch.peers.leave()
        dist.barrier()
        return os.waitstatus_to_exitcode(status)


def test_sigterm_handler_without_its_thread_ends_the_process(ranks: RankPool) -> None:
    assert ranks.run(2, sigterm_after_the_thread) == [-signal.SIGTERM] * 2


def forks(rank: int, of_the_job: bool) -> Any:
    with watching(rank) as watch:
        links = watch.peers._links
        assert links is not None
        if of_the_job:  # --exit-signal-handler
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = os.fork()
        if child == 0:
            closed = all(line.socket.fileno() == -1 for line in links._lines)
            handler = signal.getsignal(signal.SIGTERM) is (signal.SIG_IGN if of_the_job else signal.SIG_DFL)
            woken = signal.set_wakeup_fd(-1) != -1
            os._exit(0 if closed and handler and not woken and watch.peers._links is None else 1)
        status = os.waitpid(child, 0)[1]
        watch.peers.leave()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        dist.barrier()
        return status, watch.printed


@pytest.mark.parametrize("of_the_job", [False, True])
def test_forked_process_does_not_inherit_connections_and_handlers(ranks: RankPool, of_the_job: bool) -> None:
    """A data loader or checkpoint writer can outlive a killed rank; the rank's death must be noticed nevertheless."""
    assert ranks.run(2, forks, of_the_job) == [(0, [])] * 2


def leaves(rank: int) -> tuple[list[str], list[int]]:
    with watching(rank, grace_s=0.0) as watch:
        if rank == 1:
            watch.peers.leave()
        dist.barrier()
        if rank == 2:
            die(watch)
            return [], []
        if rank == 0:
            watch.wait_for_exit()
        else:
            time.sleep(0.5)
            watch.peers._at_exit()
        return watch.printed, watch.codes


def test_rank_that_left_ignores_later_losses(ranks: RankPool) -> None:
    first, second, _ = ranks.run(3, leaves)
    assert first[1] == [1], "the loss must be noticed"
    assert second == ([], [])


def exits(rank: int, code: object, together: bool) -> tuple[list[str], list[int]]:
    with watching(rank, grace_s=0.5) as watch:
        if rank == 1:
            watch.peers.fail(SystemExit(code))
            watch.peers._at_exit()
        elif together:
            watch.wait_for_loss()
            watch.peers.fail(SystemExit(code))
            watch.peers._at_exit()
        elif code:
            watch.wait_for_exit()
        dist.barrier()
        return watch.printed, watch.codes


@pytest.mark.parametrize(("code", "named"), [(3, 3), ("a reason", 1)])
def test_exit_code_is_named(ranks: RankPool, code: object, named: int) -> None:
    first, second = ranks.run(2, exits, code, False)
    assert first == ([f"rank 0: {STOPPED.format(1, f'exited with code {named}')}"], [1])
    assert second == ([], [])


def test_ranks_that_exit_together_keep_their_exit_code(ranks: RankPool) -> None:
    assert ranks.run(3, exits, 17, True) == [([], [])] * 3


def test_exit_code_0_is_no_loss(ranks: RankPool) -> None:
    assert ranks.run(2, exits, 0, False) == [([], [])] * 2


def hangs_in_exit(rank: int) -> list[int]:
    with watching(rank, grace_s=0.5) as watch:
        if rank == 1:
            watch.peers.fail(SystemExit(17))
            return []
        watch.wait_for_loss()
        watch.peers.fail(SystemExit(17))
        return watch.wait_for_exit()[1]


def test_rank_that_hangs_at_exit_ends_with_its_exit_code(ranks: RankPool) -> None:
    assert ranks.run(2, hangs_in_exit)[0] == [17]


def loses_a_connection(rank: int) -> list[str]:
    with watching(rank) as watch:
        if rank == 1:
            error = ConnectionRefusedError("of the object storage")
            assert not watch.peers.explain(error)
            watch.peers.fail(error)
            return []
        return watch.wait_for_exit()[0]


def test_lost_connection_is_named(ranks: RankPool) -> None:
    how = "lost a connection (ConnectionRefusedError)"
    assert ranks.run(2, loses_a_connection)[0] == [f"rank 0: {STOPPED.format(1, how)}"]


def watches_again(rank: int) -> tuple[bool, bool, bool, list[str]]:
    def held() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    with watching(rank):
        pass
    before = held()
    with watching(rank):
        during = held()
    after = held()
    restored = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return during > before, after == before, restored, one_dies(rank, 1)[0]


def test_watching_twice_releases_threads_files_and_handlers(ranks: RankPool) -> None:
    """A process may train twice."""
    first, second = ranks.run(2, watches_again)
    assert first == (True, True, True, [f"rank 0: {STOPPED.format(1, 'died')}"])
    assert second == (True, True, True, [])

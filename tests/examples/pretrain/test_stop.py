import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from pretrain.stop import StopRequest
from tests.helpers.launch import Death, run_training
from tests.helpers.ranks import RankFailure, RankPool
from tests.helpers.training import SMALL, losses, read_metrics

HANDLERS = (signal.SIGTERM, signal.SIGINT)


def everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def signalled_in(rank: int, iteration: int) -> tuple[int, bool]:
    """Run ten empty iterations and signal rank 1 in one of them.

    Returns:
        The last iteration, and whether the signal handlers were restored.
    """
    before = [signal.getsignal(number) for number in HANDLERS]
    last = 0
    with StopRequest(everyone(), f"rank {rank}") as stop:
        for last in range(1, 11):
            if rank == 1 and last == iteration:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.decided():
                break
            stop.vote(0.0)
    stop.decided()
    return last, [signal.getsignal(number) for number in HANDLERS] == before and signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(("iteration", "last"), [(1, 2), (4, 5), (10, 10), (11, 10)])
def test_all_ranks_stop_after_the_same_iteration(ranks: RankPool, iteration: int, last: int) -> None:
    assert ranks.run(2, signalled_in, iteration) == [(last, True)] * 2


def threads_left(rank: int) -> list[str]:
    with StopRequest(everyone(), f"rank {rank}"):
        if (child := os.fork()) == 0:  # like a worker of a data loader, it keeps the sockets open
            time.sleep(20.0)
            os._exit(0)
    left = [thread.name for thread in threading.enumerate() if thread.name == "stop-request"]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return left


def test_thread_ends_with_the_request(ranks: RankPool) -> None:
    """If it freed a process group while the interpreter ends, the process would abort."""
    assert ranks.run(1, threads_left, timeout=30) == [[]]


def never_votes(rank: int) -> None:
    with StopRequest(everyone(), f"rank {rank} of the test", shortest_grace_s=0.2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30.0)  # like a collective: Python's handler runs, but the wait continues


def test_hanging_rank_exits_after_the_grace_period(ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks.run(1, never_votes, timeout=20)
    report = caught.value.reports[0]
    assert "exited with status 1" in report
    assert "rank 0 of the test was asked to stop but its iteration did not end within 0 s" in report


def is_busy(rank: int) -> str:
    """Send a signal before slow work that makes progress: an evaluation, a checkpoint, the end of the run."""
    with StopRequest(everyone(), f"rank {rank}", shortest_grace_s=0.3) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(5):
            time.sleep(0.15)
            stop.alive()
        with stop.patience():
            time.sleep(0.8)
        stop.ended()
        time.sleep(0.8)
    return "completed"


def test_evaluation_and_checkpoint_are_not_interrupted(ranks: RankPool) -> None:
    assert ranks.run(1, is_busy) == ["completed"]


def interrupts_twice(rank: int) -> str:
    with StopRequest(everyone(), f"rank {rank}"):
        os.kill(os.getpid(), signal.SIGINT)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5.0)
        except KeyboardInterrupt:
            return "interrupted"
    return "continued"


def test_second_ctrl_c_interrupts(ranks: RankPool) -> None:
    assert ranks.run(1, interrupts_twice) == ["interrupted"]


def test_signalled_run_saves_and_exits_with_0(tmp_path: Path) -> None:
    """One rank receives the signal in iteration 2; the run ends after iteration 3 and can be resumed."""
    step = "megatron.core.optimizer.optimizer:ChainedOptimizer.step"
    flags = f"{SMALL} --mock-data --pipeline-model-parallel-size 2 --train-iters 1000 --save {tmp_path}/saved"
    flags += " --global-batch-size 4"
    words = [*flags.split(), "--metrics-file", str(tmp_path / "metrics")]
    ended = run_training(2, words, tmp_path, Death(0, step, call=2, number=signal.SIGTERM))
    assert [rank.exit_code for rank in ended] == [0, 0], ended
    assert list(losses(read_metrics(tmp_path / "metrics"))) == [1, 2, 3]
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert re.search(r"saved iteration 3 to .*iter_0000003", ended[1].output)

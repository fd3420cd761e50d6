"""Tests of the rank pool: reuse of processes, sizes, and all kinds of rank failures."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state

from megatron.zero_bubble.integration import patching
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from tests.helpers.ranks import REPOSITORY, RankFailure, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A separate pool for this module, because most of its tests break the pool."""
    pool = RankPool(initializer=nothing)
    yield pool
    pool.close()


def nothing() -> None:
    pass


def broken_start() -> None:
    raise ImportError("no platform here")


def report_rank(rank: int, offset: int) -> tuple[int, int, int, int]:
    total = torch.tensor(rank + offset)
    dist.all_reduce(total)
    return rank, dist.get_world_size(), os.getpid(), int(total)


def raise_on(rank: int, bad: int) -> None:
    print(f"printed by rank {rank}")
    if rank == bad:
        raise ValueError(f"boom on {rank}")
    dist.barrier()


def exit_on(rank: int, bad: int, status: int) -> None:
    if rank == bad:
        os._exit(status)
    dist.barrier()


def kill_on(rank: int, bad: int) -> None:
    import torch.distributed as dist

    dist.barrier()  # on a busy machine some ranks may still be connecting
    time.sleep(0.2)
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)


def sleep_in_the_named_function(rank: int) -> None:
    time.sleep(60)


def call_sys_exit(rank: int) -> None:
    sys.exit(2)


def start_a_child(rank: int) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid


def random_tensor(rank: int) -> torch.Tensor:
    return torch.rand(3, requires_grad=True)


def unpicklable(rank: int) -> object:
    return lambda: None


def use_model_parallel(rank: int, pipeline_size: int) -> int:
    assert not parallel_state.is_initialized()
    assert num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline_size)
    num_microbatches_calculator.init_num_microbatches_calculator(rank, None, 4, 2, 1)
    return parallel_state.get_pipeline_model_parallel_rank()


def leave_patches(rank: int) -> None:
    patching.apply(ZeroBubbleConfig(schedule="zb-h1"))


def assert_rank_zero(rank: int) -> None:
    assert dist.is_initialized()
    assert rank == 0, "left over"


def test_processes_are_reused_across_sizes(pool: RankPool) -> None:
    pids: dict[int, list[int]] = {}
    for size in (2, 4, 1, 4, 2):
        results = pool.run(size, report_rank, 10)
        assert [result[:2] for result in results] == [(rank, size) for rank in range(size)]
        assert {result[3] for result in results} == {sum(range(10, 10 + size))}
        pids.setdefault(size, [result[2] for result in results])
        assert [result[2] for result in results] == pids[size]
    assert pids[4][:2] == pids[2]
    assert pool.pids() == pids[4]


def test_tensors_are_returned_and_seeds_are_equal(pool: RankPool) -> None:
    first, second = pool.run(2, random_tensor)
    again, _ = pool.run(2, random_tensor)
    assert torch.equal(first, second) and torch.equal(first, again) and first.requires_grad


def test_megatron_globals_are_reset_between_runs(pool: RankPool) -> None:
    assert pool.run(4, use_model_parallel, 2) == [0, 0, 1, 1]
    assert pool.run(4, use_model_parallel, 4) == [0, 1, 2, 3]


def test_unreverted_patches_fail_the_run(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="left patches behind.*forward_backward_pipelining_without_interleaving"):
        pool.run(1, leave_patches)


def test_exception_reports_every_rank_and_replaces_the_pool(pool: RankPool) -> None:
    pool.run(3, report_rank, 0)
    before = pool.pids()
    with pytest.raises(RankFailure, match="boom on 1") as failure:
        pool.run(3, raise_on, 1, grace=3.0)
    assert set(failure.value.reports) == {0, 1, 2}
    assert "ValueError: boom on 1" in failure.value.reports[1]
    assert "printed by rank 0" in failure.value.reports[0]
    assert pool.pids() == []
    assert not any(is_running(pid) for pid in before)
    assert [result[3] for result in pool.run(2, report_rank, 0)] == [1, 1]


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [(exit_on, (1, 7), "exited with status 7"), (kill_on, (1,), "was killed by SIGKILL")],
)
def test_rank_death_fails_the_run_at_once(pool: RankPool, fn: object, args: tuple[int, ...], message: str) -> None:
    pool.run(2, report_rank, 0)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=message) as failure:
        pool.run(2, fn, *args)
    assert time.monotonic() - start < 30.0
    assert message in failure.value.reports[1]


def test_survivors_can_answer_within_grace(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool.run(3, kill_on, 2, grace=30.0)
    assert failure.value.reports[0] == failure.value.reports[1] == "ok"
    assert "SIGKILL" in failure.value.reports[2]


def test_timeout_reports_the_stacks(pool: RankPool) -> None:
    pool.run(2, report_rank, 0)
    start = time.monotonic()
    with pytest.raises(RankFailure, match="2 of 2 ranks failed") as failure:
        pool.run(2, sleep_in_the_named_function, timeout=3.0)
    assert time.monotonic() - start < 30.0
    assert all("sleep_in_the_named_function" in report for report in failure.value.reports.values())


def test_death_between_runs_is_reported(pool: RankPool) -> None:
    pool.run(2, report_rank, 0)
    os.kill(pool.pids()[0], signal.SIGKILL)
    with pytest.raises(RankFailure, match="was killed by SIGKILL"):
        pool.run(2, report_rank, 0)


@pytest.mark.parametrize(("fn", "message"), [(call_sys_exit, "SystemExit: 2"), (unpicklable, "pickle")])
def test_sys_exit_and_pickle_errors_are_reported(pool: RankPool, fn: object, message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        pool.run(1, fn)


def test_after_hook_runs_on_each_rank(pool: RankPool) -> None:
    pool.run(1, report_rank, 0, after=assert_rank_zero)
    with pytest.raises(RankFailure, match="left over") as failure:
        pool.run(2, report_rank, 0, after=assert_rank_zero)
    assert failure.value.reports[0] == "ok"


def test_failing_initializer_is_reported() -> None:
    pool = RankPool(initializer=broken_start)
    with pytest.raises(RankFailure, match="no platform here"):
        pool.run(2, report_rank, 0)
    pool.close()


def test_ranks_with_too_many_threads_are_replaced(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.run(2, report_rank, 0)
    before = pool.pids()
    pool.run(2, report_rank, 0)
    assert pool.pids() == before
    monkeypatch.setattr("tests.helpers.ranks.MAX_THREADS", 0)
    pool.run(2, report_rank, 0)
    assert not set(pool.pids()) & set(before)


def test_close_ends_all_processes() -> None:
    pool = RankPool(initializer=nothing)
    children = pool.run(2, start_a_child)
    pids = pool.pids() + children
    assert all(is_running(pid) for pid in pids)
    pool.close()
    assert_all_end(pids)


def test_killed_parent_ends_all_processes() -> None:
    code = (  # without the slow imports, which this job does not need
        "import os, threading; from tests.helpers import ranks, rank_worker; ranks.PRELOADED = []; "
        "pool = ranks.RankPool(os.getpid); pool._grow(2); "
        "threading.Timer(0.5, lambda: print(*pool.pids(), flush=True)).start(); "  # when they work on the job
        "pool.run(2, rank_worker.sleep)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    assert_all_end(pids)


def assert_all_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 30.0
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def parent_and_threads(rank: int) -> tuple[int, str]:
    return os.getppid(), os.environ["OMP_NUM_THREADS"]


@pytest.mark.full  # only ranks on GPUs are started this way
def test_ranks_need_not_be_forked_from_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on GPUs are children of the test process, because CUDA does not survive a fork."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    pool = RankPool(initializer=nothing, forked=False)
    try:
        assert pool.run(2, parent_and_threads) == [(os.getpid(), "1")] * 2
    finally:
        pool.close()

"""Process groups of this package wait as long as those of the job, and are cut off with everything under way."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.engine.runtime.groups import Directions, cause_of_cut, cut, destroy, job_timeout, new_group
from megatron.zero_bubble.engine.runtime.transport import lost_connection
from tests.helpers.ranks import RankPool

JOB_TIMEOUT_S = 77.0


def timeouts(_rank: int) -> list[timedelta]:
    world: Any = dist.group.WORLD
    own = new_group([0, 1], "gloo")
    given = new_group([0, 1], "gloo", timedelta(seconds=5))
    groups = [own, given, *Directions.of(world).groups.values()]
    return [job_timeout(), *(group._get_backend(torch.device("cpu")).options._timeout for group in groups)]  # type: ignore[list-item]


def test_groups_have_the_timeout_of_the_job(ranks: RankPool) -> None:
    job = timedelta(seconds=JOB_TIMEOUT_S)
    for found in ranks.run(2, timeouts, timeout=JOB_TIMEOUT_S):
        assert found == [job, job, timedelta(seconds=5), job, job]


def cut_off(rank: int) -> list[str | None]:
    """Rank 0 cuts its groups, with transfers under way to which it still refers; returns why they failed, and it."""
    first, second = new_group([0, 1], "gloo"), new_group([0, 1], "gloo")
    of_job = dist.new_group([0, 1])
    buffers = [torch.zeros(1 << 20) for _ in range(3)]
    if rank == 0:
        works = [first.send([buffers[0]], 1, 0), second.recv([buffers[1]], 1, 0)]
        dist.barrier(of_job)
        cut("rank 0 failed")
    else:
        works = [first.recv([buffers[0]], 0, 7), second.recv([buffers[1]], 0, 0)]
        dist.barrier(of_job)
    found = []
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            found.append(lost_connection(error))
    assert of_job is not None
    dist.all_reduce(buffers[2], group=of_job)
    given = cause_of_cut()
    destroy(first, second)
    return [*found, given, cause_of_cut()]


def test_a_rank_that_cuts_its_groups_fails_all_transfers_and_no_groups_of_the_job(ranks: RankPool) -> None:
    for found in ranks.run(2, cut_off):
        *reasons, given, of_destroyed = found
        assert len(reasons) == 2 and all(reasons)
        assert given == "rank 0 failed" and of_destroyed is None

"""Fixtures, hypothesis settings and collection rules for all tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.helpers.ranks import RankPool

TESTS = Path(__file__).parent

# No deadline: a busy machine would exceed it. Derandomized: a failing example fails on every machine.
settings.register_profile("pipeline", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("pipeline")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of CPU ranks: ``ranks.run(num_ranks, fn, *args)``. Its processes start with the first run."""
    pool = RankPool()
    yield pool
    pool.close()


WITHOUT_POOL = frozenset("analysis cli costs formats gpu_day job plan planning render schedules search".split())
"""The folders whose tests do not run on the pool of ranks. Those of ``gpu_day`` start processes of their own."""
FILES_WITHOUT_POOL = ("tests/bench/test_peer_schedules.py", "tests/bench/test_ladder.py")
FILES_AS_IF_ON_POOL = ("tests/cli/test_launch_scripts.py",)
"""Tests of the folders above that start several nodes, and would be slow next to those on the pool."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests that run on the pool of ranks to one worker of pytest-xdist, so that there is one pool; the other
    worker runs the rest.
    """
    from xdist.scheduler import LoadScopeScheduling

    class RanksTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            _, folder, *_ = nodeid.split("/")
            if nodeid.startswith(FILES_WITHOUT_POOL):
                return nodeid
            return nodeid if folder in WITHOUT_POOL and not nodeid.startswith(FILES_AS_IF_ON_POOL) else "ranks"

    return RanksTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests on machines without a GPU; torch is imported only if a GPU test was collected."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

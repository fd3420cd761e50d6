"""Fixtures, hypothesis settings and collection rules for all tests."""

from collections.abc import Iterator
from pathlib import Path

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


WITHOUT_RANKS = frozenset("analysis cli costs formats job plan planning render schedules search".split())
"""The folders whose tests start no training processes, except for those that are in the group themselves."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist, which reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all tests that start ranks to one worker of pytest-xdist, so that they share a pool and run one at a time;
    the other worker runs the rest.
    """
    for item in items:
        if item.path.relative_to(TESTS).parts[0] not in WITHOUT_RANKS:
            item.add_marker(pytest.mark.xdist_group("ranks"))
    _skip_without_gpu(items)


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    """Skip GPU tests on machines without a GPU; torch is imported only if a GPU test was collected."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

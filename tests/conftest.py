"""Fixtures, hypothesis settings and collection rules for all tests."""

import functools
import re
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


FORKED_RANKS = re.compile(r"\b(RankPool|run_training|LaunchServer|checkouts)\b")


@functools.cache
def scope_of(file: str) -> str | None:
    """The name of the tests that one worker of pytest-xdist must run together with those of a file; None if its tests
    share nothing.
    """
    text = (TESTS.parent / file).read_text()
    if FORKED_RANKS.search(text):
        return "ranks"  # forked from a process with the slow imports done
    return file if 'scope="module"' in text else None  # a browser, a server with its answers, or plans


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests on forked ranks to one worker of pytest-xdist, so that there is one pool of ranks, and those of a
    file that share a fixture; the other tests go one by one to the worker that has nothing to do.
    """
    from xdist.scheduler import LoadScopeScheduling

    class RanksTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid.partition("::")[0]) or nodeid

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

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
settings.register_profile("full", deadline=None, derandomize=True, database=None, max_examples=60)
settings.register_profile("some", settings.get_profile("full"), max_examples=30)


def pytest_configure(config: pytest.Config) -> None:
    """Without the tests of the full matrix, draw half as many examples."""
    settings.load_profile("some" if config.getoption("markexpr") == "not full" else "full")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of CPU ranks: ``ranks.run(num_ranks, fn, *args)``. Its processes start with the first run."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search with a small part of the budget: for tests of what is done with a plan, not of how good it is."""
    monkeypatch.setattr("megatron.zero_bubble.core.search.portfolio._BUDGET", (30_000, 1_000_000))
    monkeypatch.setattr("megatron.zero_bubble.core.search.steep._BUDGET", (6_000, 1_000_000))


CHECKOUTS = re.compile(r"\bcheckouts\b")
SHARED = re.compile(r"\b(RankPool|run_training|LaunchServer)\b|scope=\"module\"")


@functools.cache
def scope_of(file: str) -> str | None:
    """The name of the tests that one worker of pytest-xdist must run together with those of a file; None if its tests
    share nothing.
    """
    text = (TESTS.parent / file).read_text()
    if CHECKOUTS.search(text):
        return "checkouts"  # forked from a process per checkout of Megatron-LM, which has done the slow imports
    return file if SHARED.search(text) else None  # ranks and their results, a browser, a server, or plans


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give one worker of pytest-xdist all tests on checkouts, one those of a file with ranks or fixtures of its own.

    Every worker has a pool of ranks. The largest groups go first; the other tests go one by one to the worker that has
    nothing to do, so that both end at the same time.
    """
    from xdist.scheduler import LoadScopeScheduling

    class SharedTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid.partition("::")[0]) or nodeid

    return SharedTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests on machines without a GPU; torch is imported only if a GPU test was collected."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

"""Fixtures that all tests share."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.helpers.ranks import RankPool

# A deadline an example would fail on a busy machine; fixed examples make a failure everybody's.
settings.register_profile("tests", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of CPU ranks: ``ranks.run(num_ranks, fn, *args)``. Its processes start with the first run."""
    pool = RankPool()
    yield pool
    pool.close()

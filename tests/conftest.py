"""Fixtures and rules that all tests share."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.helpers.ranks import RankPool

# A busy machine would fail an example by its deadline; examples that are always the same fail for everybody or nobody.
settings.register_profile("pipeline", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("pipeline")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of CPU ranks: ``ranks.run(num_ranks, fn, *args)``. Its processes start with the first run."""
    pool = RankPool()
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; torch is asked only when such a test was collected."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

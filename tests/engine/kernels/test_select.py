"""Tests of the choice of implementation, and that missing compiled ops are logged once per process or job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron.zero_bubble.engine.kernels import compare_ranks, implementation, reference, select
from megatron.zero_bubble.engine.kernels.implementation import _load
from tests.helpers.parity import Layout, train
from tests.helpers.ranks import RankPool


@pytest.fixture(autouse=True)
def uncached() -> Iterator[None]:
    for cached in (select, _load):
        cached.cache_clear()
    yield
    for cached in (select, _load):
        cached.cache_clear()


def test_compiled_ops_are_selected_if_built() -> None:
    assert select("cpu").words == "compiled"


@pytest.mark.parametrize(
    "spec, why",
    [
        (None, "not built; install with `pip install --no-build-isolation`"),
        (SimpleNamespace(origin="/no/such/_ops.so"), "/no/such/_ops.so does not load into torch"),
    ],
)
def test_fallback_to_plain_torch_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spec: object, why: str
) -> None:
    monkeypatch.setattr("megatron.zero_bubble.engine.kernels.implementation.find_spec", lambda name: spec)
    for _ in range(2):
        kernels = select("cpu")
    assert kernels.ops is reference and why in kernels.words
    assert [why in record.message for record in caplog.records] == [True]


def warnings_of(run: Callable[[], object], lacks_ops: bool) -> list[str]:
    """What the choice of implementation logs on this rank while ``run`` runs, with or without compiled ops."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger(implementation.__name__)
    logger.addHandler(handler)
    for cached in (select, _load):
        cached.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        if lacks_ops:
            patch.setattr(implementation, "find_spec", lambda name: None)
        run()
    logger.removeHandler(handler)
    for cached in (select, _load):
        cached.cache_clear()
    return [record.getMessage() for record in records]


def compared(rank: int, lacking: set[int]) -> list[str]:
    return warnings_of(lambda: compare_ranks("cpu"), rank in lacking)


@pytest.mark.parametrize(
    "lacking, named", [({1, 3}, "ranks 1, 3"), ({2}, "rank 2"), ({0, 1, 2}, "ranks 0-2"), ({0, 1, 2, 3}, "all ranks")]
)
def test_first_rank_names_the_ranks_without_compiled_ops(ranks: RankPool, lacking: set[int], named: str) -> None:
    first, *others = ranks.run(4, compared, lacking, timeout=60)
    (warning,) = first
    assert warning.startswith(f"weight gradients on {named}: plain torch (not built; install with")
    assert others == [[], [], []]


def test_nothing_is_logged_if_all_ranks_have_compiled_ops(ranks: RankPool) -> None:
    assert ranks.run(2, compared, set(), timeout=60) == [[], []]


def trained(rank: int, flags: str) -> list[str]:
    """Train three iterations, with rank 1 without compiled ops."""
    return warnings_of(lambda: train(rank, flags, ["1f1b"]), rank == 1)


def test_job_names_the_ranks_without_compiled_ops_once(ranks: RankPool) -> None:
    first, second = ranks.run(2, trained, Layout(2).flags(3, "--zero-bubble-fuse-wgrad"), timeout=120)
    assert [warning.partition(" (")[0] for warning in first] == ["weight gradients on rank 1: plain torch"]
    assert second == []


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch may have ops for CUDA")
def test_device_without_compiled_ops() -> None:
    assert "built without CUDA" in select("cuda").words

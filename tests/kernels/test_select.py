"""Tests of the choice of implementation, and that missing compiled ops are logged once."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron.zero_bubble.kernels import reference, select
from megatron.zero_bubble.kernels.implementation import _load


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
    monkeypatch.setattr("megatron.zero_bubble.kernels.implementation.find_spec", lambda name: spec)
    for _ in range(2):
        kernels = select("cpu")
    assert kernels.ops is reference and why in kernels.words
    assert [why in record.message for record in caplog.records] == [True]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch may have ops for CUDA")
def test_device_without_compiled_ops() -> None:
    assert "built without CUDA" in select("cuda").words

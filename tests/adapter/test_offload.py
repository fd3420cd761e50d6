"""A schedule gives the same bits whether what its forwards save stays on the device or moves to host memory."""

from __future__ import annotations

import pytest

from tests.helpers.parity import Layout, assert_same_bits, train
from tests.helpers.ranks import RankPool

ALL, HALF = "--zero-bubble-offload all", "--zero-bubble-offload 50%"


@pytest.mark.parametrize("name", ["zb-h1"])
def test_same_bits_as_without_offload(ranks: RankPool, name: str) -> None:
    runs = [None, name, f"{name} {ALL}", f"{name} {HALF}"]
    flags = Layout(2).flags(4, "--seq-length 64 --max-position-embeddings 64 --hidden-size 32")
    assert_same_bits(ranks.run(2, train, flags, runs, timeout=120), runs)

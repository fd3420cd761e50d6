"""Losses, gradient norms and weights after five steps are those of stock megatron-core, bit for bit."""

from __future__ import annotations

import pytest

from tests.helpers.parity import assert_same_bits, train
from tests.helpers.ranks import RankPool

SCHEDULES = [None, "1f1b", "zb-h1", "zb-h2"]


def flags(pipeline: int, num_microbatches: int, options: str = "", tensor: int = 1, data: int = 1) -> str:
    """The parallel layout and batch sizes of a case, then its options; a microbatch has two samples."""
    return (
        f"--num-layers {pipeline} --pipeline-model-parallel-size {pipeline} --tensor-model-parallel-size {tensor} "
        f"--global-batch-size {2 * num_microbatches * data} {options}"
    )


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 7])
def test_two_stages(ranks: RankPool, num_microbatches: int) -> None:
    results = ranks.run(2, train, flags(2, num_microbatches), SCHEDULES, timeout=120)
    assert_same_bits(results, SCHEDULES)

"""Stages that repeat CUDA graphs over NCCL give the same bits as without.

With ``ZB_TEST_DEVICE=cpu``, they run on CPU ranks, where a stand-in takes the place of graphs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.zero_bubble.engine.platforms.cuda import nccl_shares_gpus
from tests.helpers.graphs import StandInPool
from tests.helpers.rank_worker import Group
from tests.helpers.ranks import RankPool, install_cpu_platform
from tests.helpers.stage_graphs import Row, train

ON_CPU = os.environ.get("ZB_TEST_DEVICE") == "cpu"
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
ROWS = {
    "zb-h1 in fp32": Row("zb-h1", counts=(6,) * 5),
    "zb-h1 in bf16 with dropout": Row("zb-h1", fused=True, options={**BF16, "hidden_dropout": 0.1}),
    "zb-v in fp32": Row("zb-v", counts=(6,) * 5, fused=True),
    "zb-v in bf16": Row("zb-v", counts=(6,) * 5, options=BF16),
}

pytestmark = [pytest.mark.timeout(200), *([] if ON_CPU else [pytest.mark.gpu])]


def nothing() -> None:
    """The initializer of ranks on GPUs."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    if not ON_CPU and torch.cuda.device_count() < (1 if nccl_shares_gpus() else 2):
        pytest.skip("NCCL needs one GPU per rank")
    made = RankPool(install_cpu_platform if ON_CPU else nothing, Group() if ON_CPU else Group("nccl"), forked=ON_CPU)
    yield made
    made.close()


@pytest.mark.parametrize("name", ROWS)
def test_graphs_have_the_same_bits(pool: RankPool, record_property: Any, name: str) -> None:
    more = (StandInPool, nothing_more, False, not ON_CPU)
    eager, graphed = (pool.run(2, train, ROWS[name], graphs, *more, timeout=45) for graphs in (False, True))
    record_property("equal", [one[0] == other[0] for one, other in zip(eager, graphed, strict=True)])
    assert [read for read, _ in graphed] == [read for read, _ in eager]
    assert all(all(numbers) for _, numbers in graphed)


def nothing_more(_: Any) -> None:
    """Change nothing."""

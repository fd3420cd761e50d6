"""Sharded units of models with experts: the bits of plain data parallelism, over both kinds of replicas."""

from __future__ import annotations

import pytest
import torch

from megatron.zero_bubble import build
from megatron.zero_bubble.core.plan import shard as plan_shard
from megatron.zero_bubble.core.plan.shard import Sharding
from tests.helpers.parity import Layout, assert_same_bits
from tests.helpers.ranks import RankPool
from tests.integration.adapter.test_parity import EXPERTS, UNTIED
from tests.integration.adapter.test_shards import (
    BASE,
    CHUNKS,
    FP16,
    NO_EVALUATION,
    SHARDED,
    WHOLE,
    by_stage,
    planned,
    train,
)

DIVIDED = f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
TWO = Layout(2, data=2, num_layers=4)
ROWS = {
    "two replicas of experts": (TWO, f"{EXPERTS} --bf16 {UNTIED}"),
    "one replica of experts": (TWO, DIVIDED),
    "one replica of experts, bf16, per-token loss": (TWO, f"{DIVIDED} --bf16 --calculate-per-token-loss {UNTIED}"),
    "two replicas of experts, tied": (TWO, EXPERTS),
    "fp16, overflows": (TWO, f"{DIVIDED} {FP16}"),
    "shared experts": (TWO, f"{DIVIDED} --moe-shared-expert-intermediate-size 32 --bf16"),
    "recompute": (TWO, f"{DIVIDED} --recompute-granularity selective"),
    "tensor parallelism": (
        Layout(2, tensor=2, data=1, num_layers=4),
        f"{EXPERTS} --moe-token-dispatcher-type alltoall --sequence-parallel --expert-tensor-parallel-size 1",
    ),
    "four replicas, two of experts": (Layout(2, data=4, num_layers=4), f"{DIVIDED} --bf16"),
    "four ranks": (Layout(4, data=2, num_layers=8), f"{DIVIDED} --bf16 {UNTIED}"),
}
FAST = ("one replica of experts",)


@pytest.mark.parametrize("row", [pytest.param(row, marks=() if row in FAST else pytest.mark.full) for row in ROWS])
def test_one_unit_has_the_bits_of_plain_data_parallelism(ranks: RankPool, row: str) -> None:
    layout, options = ROWS[row]
    count = 2 * layout.pipeline
    runs = [None, f"zero-pp {SHARDED} {count}"]
    flags = layout.flags(count, f"{BASE} {CHUNKS} 2 {options}")
    results = ranks.run(layout.num_ranks, train, flags, runs, timeout=200)
    assert_same_bits([[trained.outcome for trained in of_rank] for of_rank in results], runs)
    for of_rank in results:
        assert of_rank[1].reductions == 2
        assert ("skipped" in of_rank[1].outcome.grad_norms) == row.startswith("fp16")


@pytest.mark.full
@pytest.mark.parametrize("options", [EXPERTS, DIVIDED], ids=["two replicas of experts", "one replica of experts"])
def test_smaller_units_and_their_bytes(ranks: RankPool, options: str) -> None:
    """Units of one and two of four microbatches; the gradients of whole experts are scaled once, not once per unit."""
    layout, v = Layout(2, data=2, num_layers=8), 4
    kinds = [Sharding(4), Sharding(2), Sharding(1, 1)]
    runs = [f"zero-pp {SHARDED} {of.unit_microbatches} {WHOLE} {of.open_chunks}" for of in kinds]
    flags = layout.flags(4, f"{BASE} {CHUNKS} {v} {NO_EVALUATION} {options}")
    for rank, (plain, *sharded) in enumerate(ranks.run(4, train, flags, [None, *runs], timeout=200)):
        weights, gradients = by_stage(plain.sizes, rank // 2)
        for of, trained in zip(kinds, sharded, strict=True):
            unit = of.unit_microbatches
            assert torch.allclose(trained.weights, plain.weights, rtol=0, atol=1e-5), unit
            schedule = build("zero-pp", num_ranks=2, num_microbatches=4, num_chunks=v, unit_microbatches=unit)
            row = planned(schedule, of, rank // 2)
            assert (trained.gathered, trained.reduced) == plan_shard.traffic_bytes(row, weights, gradients)
            assert trained.whole == plan_shard.most_whole(row, weights, gradients)
            assert trained.kept == 0

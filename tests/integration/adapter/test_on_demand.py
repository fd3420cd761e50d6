"""Sharded units whose replicas exchange shards on demand: repeatable bits, those of collectives up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from tests.examples.pretrain.test_faults import check_survivors, flags
from tests.helpers.launch import Death, run_training
from tests.helpers.parity import Layout, assert_same_bits
from tests.helpers.ranks import RankPool
from tests.helpers.uneven import worst_differences
from tests.integration.adapter.test_parity import EXPERTS
from tests.integration.adapter.test_shards import BASE, CHUNKS, SHARDED, TrainingResult, train
from tests.integration.adapter.test_uneven_replicas import EXPERTS as UNEVEN_EXPERTS
from tests.integration.adapter.test_uneven_replicas import OF_LENGTHS

ON_DEMAND = "--zero-bubble-shard-transport on-demand"
TOGETHER = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
TWO = Layout(2, data=2, num_layers=4)


def trained(ranks: RankPool, layout: Layout, options: str, units: int) -> list[list[TrainingResult]]:
    runs = [f"zero-pp {SHARDED} {units} {transport}" for transport in ("", ON_DEMAND, ON_DEMAND)]
    job = layout.flags(4, f"{BASE} {CHUNKS} 2 --train-iters 3 {options}")
    results = ranks.run(layout.num_ranks, train, job, runs, timeout=200)
    again = [[own.outcome for own in of_rank[1:]] for of_rank in results]
    assert_same_bits(again, runs[1:], steps=3)
    return results


@pytest.mark.parametrize(
    ("layout", "options", "units"),
    [
        pytest.param(TWO, "", 2, marks=pytest.mark.full),
        pytest.param(
            TWO, "--calculate-per-token-loss --untie-embeddings-and-output-weights", 1, marks=pytest.mark.full
        ),
        pytest.param(Layout(2, data=4, num_layers=4), "", 2, marks=pytest.mark.full),
        pytest.param(TWO, "--fp16 --initial-loss-scale 262144", 2, marks=pytest.mark.full),
        pytest.param(TWO, f"{EXPERTS} --bf16", 2, marks=pytest.mark.full),
        pytest.param(TWO, f"{EXPERTS} {TOGETHER}", 2, marks=pytest.mark.full),
        pytest.param(Layout(2, data=4, num_layers=4), f"{EXPERTS} {TOGETHER}", 2, marks=pytest.mark.full),
    ],
)
def test_runs_repeat_bit_for_bit_and_equal_collectives(
    ranks: RankPool, layout: Layout, options: str, units: int
) -> None:
    """The norm of the first gradients within 1e-6; then Adam enlarges rounding where gradients are nearly 0."""
    for by_collectives, on_demand, _ in trained(ranks, layout, options, units):
        norms = [float.fromhex(own.outcome.grad_norms[0]) for own in (on_demand, by_collectives)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        assert torch.allclose(on_demand.weights, by_collectives.weights, rtol=0, atol=1e-5)
        assert on_demand.reductions == by_collectives.reductions
        assert on_demand.gathers <= by_collectives.gathers  # these are also of evaluations


@pytest.mark.parametrize(
    ("layout", "experts"),
    [
        (TWO, ""),
        pytest.param(TWO, UNEVEN_EXPERTS, marks=pytest.mark.full),
        pytest.param(Layout(2, data=4, num_layers=4), f"{UNEVEN_EXPERTS} {TOGETHER}", marks=pytest.mark.full),
    ],
)
def test_replicas_need_not_run_the_same_plan(ranks: RankPool, layout: Layout, experts: str) -> None:
    """Different numbers of microbatches, and so of units."""
    job = layout.flags(1, f"{OF_LENGTHS} --use-distributed-optimizer {CHUNKS} 2 {experts}")
    results = ranks.run(layout.num_ranks, worst_differences, job, f"zero-pp {SHARDED} 2 {ON_DEMAND}", timeout=120)
    for of_rank in results:
        assert max(worst for worst, _ in of_rank) <= 1e-6, of_rank
        assert max(loss for _, loss in of_rank) <= 1e-6, of_rank


@pytest.mark.full
@pytest.mark.parametrize("call", ["gather", "reduce", "complete"])
def test_a_killed_replica_ends_the_run(tmp_path: Path, call: str) -> None:
    more = f"--use-distributed-optimizer {CHUNKS} 2 --zero-bubble-shard-weights {ON_DEMAND}"
    method = f"megatron.zero_bubble.integration.adapter.on_demand:OnDemandChunk.{call}"
    words = flags(TWO, 4, *more.split(), schedule="zero-pp")
    check_survivors(run_training(4, words, tmp_path, Death(3, method, call=3)), 3)


def test_a_transport_without_shards_is_refused() -> None:
    with pytest.raises(UserError, match="shard_transport=on-demand works only with sharded units"):
        ZeroBubbleConfig("zero-pp", shard_transport="on-demand")

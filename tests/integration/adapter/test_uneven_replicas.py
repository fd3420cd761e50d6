"""Replicas with different numbers of microbatches of different lengths have the gradients of all samples on one."""

from __future__ import annotations

import pytest

from tests.helpers.parity import Layout
from tests.helpers.ranks import RankPool
from tests.helpers.uneven import ASSIGNMENTS, worst_differences

OF_LENGTHS = "--seq-length 48 --max-position-embeddings 48 --micro-batch-size 1 --calculate-per-token-loss"
OVERLAP = "--overlap-grad-reduce"
BUCKETS = "--ddp-bucket-size 20"  # some buckets have only weights whose gradients B computes
DISTRIBUTED = "--use-distributed-optimizer"
EXPERTS = "--num-experts 4 --swiglu --disable-bias-linear --moe-token-dispatcher-type alltoall"
SHARED = f"{EXPERTS} --expert-model-parallel-size 2"
TWO = Layout(2, data=2, num_layers=4)

full = pytest.mark.full
ROWS = {
    "plain": ("zb-h1", TWO, ""),
    "overlap, V, distributed optimizer": ("dualpipe-v", TWO, f"{OVERLAP} {BUCKETS} {DISTRIBUTED}"),
    "overlap": ("zb-h1", TWO, f"{OVERLAP} {BUCKETS}"),
    "V": ("zb-v", TWO, ""),
    "distributed optimizer, untied": ("zb-h2", TWO, f"{DISTRIBUTED} --untie-embeddings-and-output-weights"),
    "four ranks": ("zb-v", Layout(4, data=2, num_layers=8), f"{OVERLAP} {BUCKETS} {DISTRIBUTED}"),
    "tensor parallelism": ("zb-h1", Layout(2, tensor=2, data=2), f"{OVERLAP} --sequence-parallel"),
    "interleaved": ("interleaved-1f1b", TWO, f"{OVERLAP} {BUCKETS} --num-virtual-stages-per-pipeline-rank 2"),
    "parameters gathered in the forward": ("zb-v", TWO, f"{OVERLAP} {BUCKETS} {DISTRIBUTED} --overlap-param-gather"),
    "rotary, gated": ("zb-h1", TWO, "--position-embedding-type rope --swiglu --normalization RMSNorm"),
    "scaled losses, overlap": ("zb-v", TWO, f"{OVERLAP} {BUCKETS} {DISTRIBUTED}"),
    "recompute": ("zb-h1", TWO, "--recompute-granularity selective"),
    "experts": ("zb-v", TWO, f"{EXPERTS} {OVERLAP} {BUCKETS} {DISTRIBUTED}"),
    "experts that all replicas share": ("zb-h1", TWO, f"{SHARED} {OVERLAP} {BUCKETS} {DISTRIBUTED}"),
    "experts that two of four replicas share": (
        "zb-v",
        Layout(2, data=4, num_layers=4),
        f"{SHARED} {OVERLAP} {BUCKETS} {DISTRIBUTED}",
    ),
}
DEFAULT = ("overlap, V, distributed optimizer", "scaled losses, overlap")


@pytest.mark.parametrize("row", [pytest.param(row, marks=() if row in DEFAULT else full) for row in ROWS])
def test_gradients_are_those_of_all_samples_on_one_replica(ranks: RankPool, row: str) -> None:
    schedule, layout, options = ROWS[row]
    flags = layout.flags(1, f"{OF_LENGTHS} {options}")
    results = ranks.run(layout.num_ranks, worst_differences, flags, schedule, "scaled" in row, timeout=120)
    for of_rank in results:
        assert len(of_rank) == len(ASSIGNMENTS)
        assert max(worst for worst, _ in of_rank) <= 1e-6, of_rank
        assert max(loss for _, loss in of_rank) <= 1e-6, of_rank

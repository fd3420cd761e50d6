"""Parity of Megatron-LM's scripts for hybrid models with their stock runs: printed figures and weights, bit for bit."""

from __future__ import annotations

import pytest

from tests.helpers.hybrid_jobs import pretrain_hybrid, stock_hybrid
from tests.helpers.megatron_lm import VARIABLE, Checkout, checkouts
from tests.megatron_lm.test_parity import same

CHECKOUTS = [checkout for checkout in checkouts() if int(checkout.minor.partition(".")[2]) >= 16]
DIVIDES = [checkout for checkout in CHECKOUTS if (checkout.path / "pretrain_hybrid.py").is_file()]
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM with core_r0.16 or newer"),
    pytest.mark.timeout(1200),
]
PIPELINE = "--pipeline-model-parallel-size 2 --train-iters 6 --seq-length 32 --max-position-embeddings 32"
EXPERTS = "--num-experts 4 --disable-bias-linear --moe-token-dispatcher-type alltoall --moe-router-topk 2"
ROWS = {
    "transformer": ("*-*-|*-*-", ""),
    "mamba": ("M*M-|M-M*", "--untie-embeddings-and-output-weights"),
    "experts": ("M*ME|M-ME", EXPERTS),
}
"""By name: the layers of two stages, and more flags."""


def _row(checkout: Checkout, name: str) -> tuple[str, str]:
    """The pattern and the flags of a row; before ``--hybrid-layer-pattern``, Megatron itself divides the layers."""
    pattern, more = ROWS[name]
    return pattern if checkout in DIVIDES else pattern.replace("|", ""), f"{PIPELINE} {more}"


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_one_stage_per_rank_equals_stock(checkout: Checkout, name: str) -> None:
    job = checkout, 2, *_row(checkout, name)
    same(pretrain_hybrid(*job, "zb-h1"), stock_hybrid(*job))

"""Jobs of Megatron-LM whose experts overlap their all-to-all have the logs and weights of stock, with its overlap and
without.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.megatron_lm import VARIABLE, Checkout, pretrain_gpt, stock
from tests.integration.megatron_lm.test_parity import CHECKOUTS, UNTIED, same, until

pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]

_EXPERTS = (
    f"{UNTIED} --bf16 --swiglu --disable-bias-linear --num-experts 4 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--num-layers 4 --global-batch-size 8"
)
_VARIANTS = {
    "shared experts, distributed optimizer": "--moe-shared-expert-intermediate-size 32 --use-distributed-optimizer",
    "overlap of reductions": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("variant", _VARIANTS)
def test_logs_equal_both_schedules_of_stock(checkout: Checkout, variant: str) -> None:
    job = checkout, 4, f"{_EXPERTS} {_VARIANTS[variant]}"
    overlap = ("--zero-bubble-overlap-experts",)
    own = pretrain_gpt(*job, "interleaved-1f1b", overlap)
    same(own, stock(*job))
    same(own, stock(*job, ("--overlap-moe-expert-parallel-comm",)))
    # On a V, initial weights are other ones than on stock's loop.
    same(pretrain_gpt(*job, "zb-v", overlap), pretrain_gpt(*job, "zb-v"))


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_a_v_continues_a_checkpoint_as_stock_does(checkout: Checkout, tmp_path: Path) -> None:
    """``_moved`` in ``test_placements`` says why it is a checkpoint, unclipped and without an optimizer."""
    job = checkout, 4, f"{_EXPERTS} {_VARIANTS['overlap of reductions']} --clip-grad 1000 --ckpt-format torch_dist"
    stock(*job, (*until(2, tmp_path), "--no-save-optim"))
    load = ("--load", str(tmp_path), "--no-load-optim")
    own = pretrain_gpt(*job, "dualpipe-v", ("--zero-bubble-overlap-experts", *load))
    same(own, stock(*job, load))

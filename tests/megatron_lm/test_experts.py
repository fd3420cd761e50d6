"""Jobs of Megatron-LM whose experts overlap their all-to-all have the logs and weights of stock, with its overlap and
without.
"""

from __future__ import annotations

import pytest

from tests.helpers.megatron_lm import VARIABLE, Checkout, pretrain_gpt, stock
from tests.megatron_lm.test_parity import CHECKOUTS, UNTIED, same

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
    own = pretrain_gpt(*job, "interleaved-1f1b", ("--zero-bubble-overlap-experts",))
    same(own, stock(*job))
    same(own, stock(*job, ("--overlap-moe-expert-parallel-comm",)))

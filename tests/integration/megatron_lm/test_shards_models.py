"""Sharded units in jobs of Megatron-LM whose models have experts: the shapes of today's models equal stock."""

from __future__ import annotations

import pytest

from tests.helpers.hybrid_jobs import pretrain_hybrid, stock_hybrid
from tests.helpers.megatron_lm import VARIABLE, Checkout, checkouts, pretrain_gpt, stock
from tests.integration.megatron_lm.test_hybrid import DIVIDES, LOOPED
from tests.integration.megatron_lm.test_parity import same
from tests.integration.megatron_lm.test_shards import MORE, UNITS
from tests.jobs.table import SCRIPTS

CHECKOUTS = [checkout for checkout in checkouts() if int(checkout.minor.partition(".")[2]) >= 16]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM with core_r0.16 or newer"),
    pytest.mark.timeout(1200),
]
PIPELINE = "--pipeline-model-parallel-size 2"
REPLICAS = "--use-distributed-optimizer --global-batch-size 12"
DIVIDED = f"{REPLICAS} --expert-model-parallel-size 2"
LAYOUT = "--pipeline-model-parallel-layout"


def flags_of(job: str) -> str:
    """Those of a job of today, without what sharded units replace."""
    return SCRIPTS[job].flags.replace("--overlap-grad-reduce --overlap-param-gather", "")


DEEPSEEK = f"{flags_of('moe-modelzoo deepseek-v3 gb200')} {LAYOUT} Et|tt|t|mL"
MODELS = {
    "DeepSeek-V3": f"{DEEPSEEK} {DIVIDED}",
    "DeepSeek-V3, two replicas of experts, per-token loss": f"{DEEPSEEK} {REPLICAS} --calculate-per-token-loss",
    "DeepSeek-V3, prediction on a stage of its own": f"{DEEPSEEK.replace('Et|tt|t|mL', 'Ett|tt|m|L')} {DIVIDED}",
    "Kimi K2": f"{flags_of('moe-modelzoo kimi-k2')} {LAYOUT} Et|tt|t|L {DIVIDED}",
    "Qwen3-235B": f"{flags_of('moe-modelzoo qwen3-235b')} {MORE}",
    "GPT-OSS": f"{flags_of('megatron-lm gpt-oss')} {MORE} {DIVIDED}",
}


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_with_experts_equal_stock(checkout: Checkout, name: str) -> None:
    """One unit of all microbatches, so that gradients are reduced once, as in stock."""
    job = checkout, 4, f"{PIPELINE} {MODELS[name]}"
    same(pretrain_gpt(*job, "zero-pp", UNITS), stock(*job))


@pytest.mark.parametrize("checkout", DIVIDES, ids=str)
@pytest.mark.parametrize("replicas", [DIVIDED, REPLICAS], ids=["one replica of experts", "two replicas of experts"])
def test_hybrid_models_with_experts_equal_stock(checkout: Checkout, replicas: str) -> None:
    flags = f"{PIPELINE} {flags_of('megatron-lm rl nemotron6')} {replicas}"
    job = checkout, 4, LOOPED["experts"], flags
    same(pretrain_hybrid(*job, "zero-pp", UNITS), stock_hybrid(*job))

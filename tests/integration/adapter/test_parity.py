"""Losses, gradient norms and weights after five steps must equal stock megatron-core's bit for bit.

A row runs stock 1F1B and our schedules on the same ranks, and combines options that do not mask each other's errors.
A row's name begins with its main purpose. ``test_parity_full.py`` has the cross products.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from tests.helpers.hybrid_models import DELTA, train_recurrent
from tests.helpers.own_loss import train_on_logits
from tests.helpers.parity import Layout, Outcome, assert_same_bits, train
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some

SCHEDULES = [None, "1f1b", "zb-h1", "zb-h2"]

LLAMA = "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --disable-bias-linear"
ROPE = "--position-embedding-type rope"
UNTIED = "--untie-embeddings-and-output-weights"
DROPOUT = "--attention-dropout 0.2 --hidden-dropout 0.2"
FP16 = "--fp16 --initial-loss-scale 262144 --hysteresis 1"  # the first steps overflow, and are skipped
EXPERTS = "--num-experts 4 --moe-aux-loss-coeff 0.01 --swiglu --disable-bias-linear"
BUCKETS = "--ddp-bucket-size 1000"

ROWS = {
    "m=1, tied, bias": (Layout(2), 1, ""),
    "m=p=2, llama, bf16, untied, no bias": (Layout(2), 2, f"--bf16 {LLAMA} {ROPE} {UNTIED}"),
    "m=p+1=3, fp16 with loss scale, dropout, selective recompute": (
        Layout(2),
        3,
        f"{FP16} {DROPOUT} --recompute-granularity selective",
    ),
    "m=3p+1=7, full recompute, dropout, two layers per stage": (
        Layout(2, num_layers=4),
        7,
        f"--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 {DROPOUT}",
    ),
    "experts, per-token loss": (Layout(2), 3, f"{EXPERTS} {UNTIED} --calculate-per-token-loss"),
    "p=4, m=p-1=3, untied": (Layout(4), 3, UNTIED),
    "a stage without parameters": (Layout(3, num_layers=2), 4, "--pipeline-model-parallel-layout Et||tL"),
    "p=4, m=p+1=5, bf16": (Layout(4), 5, "--bf16"),
    "p=4, late receives": (Layout(4), 5, "--zero-bubble-post-receives late"),
    "tp=2, bf16, no bias": (Layout(2, tensor=2), 3, "--bf16 --disable-bias-linear"),
    "tp=2 and sequence parallel, dropout": (Layout(2, tensor=2), 3, f"--sequence-parallel {UNTIED} {DROPOUT}"),
    "dp=2, per-token loss": (Layout(2, data=2), 2, "--calculate-per-token-loss"),
    "dp=2, overlap_grad_reduce, not aligned, m grows from 1": (
        Layout(2, data=2),
        3,
        f"--overlap-grad-reduce --no-align-grad-reduce {BUCKETS} --rampup-batch-size 4 4 12",
    ),
    "dp=2, distributed optimizer, both overlaps, bf16": (
        Layout(2, data=2),
        3,
        f"--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {BUCKETS}",
    ),
    "ep=2, all-to-all": (
        Layout(2, data=2),
        2,
        f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    ),
}


QUICK = [
    name
    for name in ROWS
    if not name.startswith(("m=1,", "p=4, m=p-1", "p=4, late", "tp=2, bf16", "dp=2, per", "dp=2, o"))
]


@pytest.mark.parametrize("name", some(ROWS, *QUICK))
def test_same_bits_as_stock(ranks: RankPool, name: str) -> None:
    layout, num_microbatches, options = ROWS[name]
    results = ranks.run(layout.num_ranks, train, layout.flags(num_microbatches, options), SCHEDULES, timeout=120)
    assert_same_bits(results, SCHEDULES)


RECURRENT = {"hybrid": ("M*M-ME", 6), "gated delta nets": (DELTA, 4)}


@pytest.mark.parametrize("name", some(RECURRENT, "hybrid"))
def test_recurrent_layers_have_the_same_bits_as_stock(ranks: RankPool, name: str) -> None:
    """Of layers with a scan or a delta rule, the two matrices are split, and the rest is left to autograd in B."""
    schedules, (layers, number) = [None, "zb-h1"], RECURRENT[name]
    flags = Layout(2, num_layers=number).flags(3, f"{EXPERTS} {UNTIED}")
    assert_same_bits(ranks.run(2, train_recurrent, layers, flags, schedules, timeout=120), schedules)


@pytest.mark.parametrize(("clip", "active"), [(0.1, True), (100.0, False)])
def test_same_bits_with_gradient_clipping(ranks: RankPool, clip: float, active: bool) -> None:
    results = ranks.run(2, train, Layout(2).flags(3, f"--clip-grad {clip}"), SCHEDULES, timeout=120)
    assert_same_bits(results, SCHEDULES)
    norms = [float.fromhex(norm) for norm in results[0][0].grad_norms]
    assert all((norm > clip) == active for norm in norms), norms


@pytest.mark.parametrize("options", some(["--micro-batch-size 1", UNTIED], UNTIED), ids=["b=1", "b=2, untied"])
def test_same_bits_if_the_loss_is_outside_the_model(ranks: RankPool, options: str) -> None:
    """The gradient of the logits is transposed, and must be multiplied by the weight as stock does."""
    flags = f"--vocab-size 255 {options}"
    results = ranks.run(2, train_on_logits, Layout(2).flags(3, flags), SCHEDULES, timeout=120)
    assert_same_bits(results, SCHEDULES)


def train_with_a_fused_kernel(rank: int, flags: str, schedules: Sequence[str | None]) -> list[Outcome]:
    """Train with a fake of Apex's accumulating GEMM, which exists only for GPUs."""
    from megatron.core.tensor_parallel import layers

    kernel = ModuleType("fused_weight_gradient_mlp_cuda")
    kernel.__spec__ = ModuleSpec(kernel.__name__, None)
    kernel.wgrad_gemm_accum_fp32 = lambda x, grad, main_grad: main_grad.addmm_(grad.t().float(), x.float())
    sys.modules[kernel.__name__] = layers.fused_weight_gradient_mlp_cuda = kernel
    layers._grad_accum_fusion_available = True
    try:
        return train(rank, flags, schedules)
    finally:
        layers._grad_accum_fusion_available = False
        del sys.modules[kernel.__name__], layers.fused_weight_gradient_mlp_cuda


def test_same_bits_with_fused_accumulation(ranks: RankPool) -> None:
    overlap = f"--bf16 --overlap-grad-reduce {BUCKETS}"
    layout = Layout(2, data=2)
    results = ranks.run(4, train_with_a_fused_kernel, layout.flags(3, overlap), SCHEDULES, timeout=120)
    assert_same_bits(results, SCHEDULES)
    unfused = ranks.run(4, train, layout.flags(3, overlap), [None], timeout=120)
    assert unfused[0][0].weights != results[0][0].weights, "the fake kernel must have run"

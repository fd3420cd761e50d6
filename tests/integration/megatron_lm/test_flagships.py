"""The shapes of today's largest models, at toy size, with pairs, a divided vocabulary, a V and sharded units.

Rows of docs/models.md that no other file trains: equal to stock bit for bit, or, with a divided vocabulary, near it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.bert_jobs import pretrain_bert
from tests.helpers.delta_net_jobs import pretrain_delta_nets, stock_delta_nets
from tests.helpers.megatron_lm import VARIABLE, Checkout, Log, checkouts, pretrain_gpt, stock
from tests.integration.megatron_lm.test_models import DEEPSEEK, at_least, pretrain_vlm
from tests.integration.megatron_lm.test_parity import UNTIED, near, same, until
from tests.integration.megatron_lm.test_shards import UNITS
from tests.integration.megatron_lm.test_slices import CUTS

CHECKOUTS = checkouts()
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]


@dataclass(frozen=True)
class Flagship:
    """A model, and how a job of it runs.

    Attributes:
        flags: Megatron's.
        run: starts the job under one of our schedules.
        stock: starts it under Megatron's.
        since: the first minor of megatron-core that these rows were tried with.
    """

    flags: str
    run: Callable[..., Log] = pretrain_gpt
    stock: Callable[..., Log] = stock
    since: int = 16

    def __str__(self) -> str:
        return next(name for name, model in MODELS.items() if model is self)


_GROUPED = f"{UNTIED} --normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 2 --bf16"
_MOE = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
MODELS = {
    "DeepSeek-V3": Flagship(DEEPSEEK),
    "Kimi K2": Flagship(DEEPSEEK.replace("--mtp-num-layers 1 ", "")),
    "GPT-OSS": Flagship(
        f"{_GROUPED} {_MOE} --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 "
        "--softmax-type learnable --window-size 15,0 --window-attn-skip-freq 2 --moe-ffn-hidden-size 64 "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
        "--moe-router-dtype fp32"
    ),
    "Qwen3.5": Flagship(
        f"{_GROUPED} {_MOE} --swiglu --qk-layernorm --moe-shared-expert-intermediate-size 64 "
        "--seq-length 32 --max-position-embeddings 32",
        pretrain_delta_nets,
        stock_delta_nets,
        since=20,
    ),
}
OVERLAP = ("--zero-bubble-overlap-experts",)
MOVING = "--clip-grad 1000 --ckpt-format torch_dist"


def rows(*names: str) -> list[object]:
    return [
        pytest.param(checkout, MODELS[name], id=f"{checkout} {name}")
        for name in names
        for checkout in at_least(MODELS[name].since)
    ]


def stages(flags: str, pipeline: int) -> str:
    return f"{flags} --pipeline-model-parallel-size {pipeline} --num-layers {2 * pipeline} --global-batch-size 8"


@pytest.mark.parametrize(("checkout", "model"), rows("Qwen3.5"))
@pytest.mark.parametrize("pipeline", [2, 4])
def test_orders_equal_stock(checkout: Checkout, model: Flagship, pipeline: int) -> None:
    job = checkout, pipeline, stages(model.flags, pipeline)
    same(model.run(*job, "zb-h1"), model.stock(*job))


@pytest.mark.full
@pytest.mark.parametrize(("checkout", "model"), rows("Qwen3.5"))
@pytest.mark.parametrize("pipeline", [2, 4])
def test_a_v_continues_a_checkpoint_as_stock_does(
    checkout: Checkout, model: Flagship, pipeline: int, tmp_path: Path
) -> None:
    job = checkout, pipeline, f"{stages(model.flags, pipeline)} {MOVING}"
    model.stock(*job, tuple(until(2, tmp_path)))
    load = ("--load", str(tmp_path))
    same(model.run(*job, "zb-v", load), model.stock(*job, load))


@pytest.mark.full
@pytest.mark.parametrize(("checkout", "model"), rows("GPT-OSS", "Qwen3.5"))
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize(("schedule", "algorithm"), [("zb-h1", "1"), ("1f1b", "2")])
def test_shards_of_the_vocabulary_are_near_stock(
    checkout: Checkout, model: Flagship, pipeline: int, schedule: str, algorithm: str
) -> None:
    job = checkout, pipeline, stages(model.flags, pipeline)
    own = model.run(*job, schedule, ("--zero-bubble-vocabulary-parallel", algorithm))
    near(own, model.stock(*job), 2e-2)
    assert own.weights != model.stock(*job).weights


@pytest.mark.full
@pytest.mark.parametrize(("checkout", "model"), rows("GPT-OSS", "Kimi K2"))
@pytest.mark.parametrize("schedule", CUTS)
def test_slices_are_near_stock(checkout: Checkout, model: Flagship, schedule: str) -> None:
    job = checkout, 2, stages(model.flags, 2)
    own = model.run(*job, schedule, CUTS[schedule])
    near(own, model.stock(*job), 2e-2)
    assert own.weights != model.stock(*job).weights


@pytest.mark.full
@pytest.mark.parametrize(("checkout", "model"), rows("Qwen3.5"))
def test_sharded_units_equal_stock(checkout: Checkout, model: Flagship) -> None:
    """One unit of all microbatches, so that gradients are reduced once, as in stock."""
    more = "--use-distributed-optimizer --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 12"
    job = checkout, 4, f"{stages(model.flags, 2)} --expert-model-parallel-size 2 {more}"
    same(model.run(*job, "zero-pp", UNITS), model.stock(*job))


@pytest.mark.full
@pytest.mark.parametrize(("checkout", "model"), rows(*MODELS))
def test_pairs_equal_stock(checkout: Checkout, model: Flagship) -> None:
    job = (
        checkout,
        4,
        f"{stages(model.flags, 2)} --expert-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    )
    same(model.run(*job, "interleaved-1f1b", OVERLAP), model.stock(*job))


@pytest.mark.full
@pytest.mark.parametrize(("checkout", "model"), rows(*MODELS))
def test_pairs_on_a_v_continue_a_checkpoint_as_stock_does(checkout: Checkout, model: Flagship, tmp_path: Path) -> None:
    job = checkout, 4, f"{stages(model.flags, 2)} --expert-model-parallel-size 2 {MOVING}"
    model.stock(*job, (*until(2, tmp_path), "--no-save-optim"))
    load = ("--load", str(tmp_path), "--no-load-optim")
    same(model.run(*job, "dualpipe-v", (*OVERLAP, *load)), model.stock(*job, load))


WITH_BERT = [each for each in CHECKOUTS if each.minor == "0.16"]
BERT = f"{UNTIED} --seq-length 32 --max-position-embeddings 32 --train-iters 6"


@pytest.mark.full
@pytest.mark.parametrize("checkout", WITH_BERT, ids=str)
def test_attention_to_both_sides_in_sharded_units_equals_stock(checkout: Checkout) -> None:
    more = "--use-distributed-optimizer --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 12"
    job = checkout, 4, f"{stages(BERT, 2)} {more}"
    same(pretrain_bert(*job, "zero-pp", UNITS), pretrain_bert(*job, None))


@pytest.mark.parametrize("checkout", at_least(20), ids=str)
def test_sharded_units_of_a_script_without_virtual_stages_are_refused(checkout: Checkout) -> None:
    refused = pretrain_vlm(checkout, "zero-pp", "--use-distributed-optimizer --zero-bubble-shard-weights")
    assert refused.exit_codes == [1, 1]
    assert refused.text.count("several stages per rank need a script") == 2, refused.text[-3000:]

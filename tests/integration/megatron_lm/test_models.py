"""Models of today's jobs equal their stock runs: latent attention as DeepSeek has it, and a vision-language model.

Stock runs them on CPU ranks with stand-ins for what TransformerEngine has (``platforms/cpu``).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.bert_jobs import pretrain_t5
from tests.helpers.megatron_lm import VARIABLE, Checkout, Log, checkouts, gpt_job, pretrain_gpt, running, stock
from tests.integration.megatron_lm.test_parity import PLAIN, near, same
from tests.integration.megatron_lm.test_placements import on_a_v_after

CHECKOUTS = checkouts()
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]
UNTIED = "--untie-embeddings-and-output-weights"
LATENT = (
    f"{UNTIED} --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --kv-channels 16 --normalization RMSNorm --disable-bias-linear"
)
DEEPSEEK = (
    f"{LATENT} --swiglu --num-experts 4 --moe-layer-freq [0]+[1]*3 --moe-router-topk 2 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall "
    "--moe-shared-expert-intermediate-size 64 --mtp-num-layers 1 --bf16"
)
EXPERTS = (
    "--swiglu --disable-bias-linear --num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall"
)
AGAIN = "--recompute-granularity selective --recompute-modules mhc"


def at_least(minor: int) -> list[Checkout]:
    """The checkouts of this minor version of megatron-core or newer, with which these rows were tried."""
    return [checkout for checkout in CHECKOUTS if int(checkout.minor.partition(".")[2]) >= minor]


@pytest.mark.parametrize("checkout", at_least(16), ids=str)
def test_latent_attention_equals_stock(checkout: Checkout) -> None:
    job = checkout, 2, f"--pipeline-model-parallel-size 2 {LATENT}"
    same(pretrain_gpt(*job, "zb-h1"), stock(*job))


@pytest.mark.parametrize("checkout", at_least(16), ids=str)
def test_experts_with_latent_attention_and_prediction_equal_stock_on_a_v(checkout: Checkout, tmp_path: Path) -> None:
    own, expected = on_a_v_after(checkout, 2, f"--pipeline-model-parallel-size 2 {DEEPSEEK}", tmp_path)
    same(own, expected)


def of_the_dev_branch() -> list[Checkout]:
    """The checkouts that train hyper-connections in a pipeline."""
    config = "megatron/core/transformer/transformer_config.py"
    return [checkout for checkout in CHECKOUTS if "enable_hyper_connections" in (checkout.path / config).read_text()]


def with_hyper_connections(pipeline: int, more: str = "") -> str:
    batch = "--global-batch-size 8 --num-layers 8" if pipeline == 4 else ""
    return f"--pipeline-model-parallel-size {pipeline} {UNTIED} --enable-hyper-connections {batch} {more}"


@pytest.mark.parametrize("checkout", of_the_dev_branch(), ids=str)
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("zb-h1", ""),
        ("zb-h1", f"--num-residual-streams 2 --bf16 {AGAIN}"),
        ("interleaved-1f1b", "--num-virtual-stages-per-pipeline-rank 2"),
    ],
    ids=["zb-h1", "zb-h1, two streams, computed again", "interleaved-1f1b"],
)
def test_hyper_connections_equal_stock(checkout: Checkout, pipeline: int, schedule: str, more: str) -> None:
    job = checkout, pipeline, with_hyper_connections(pipeline, more)
    same(pretrain_gpt(*job, schedule), stock(*job))


@pytest.mark.parametrize("checkout", of_the_dev_branch(), ids=str)
@pytest.mark.parametrize("pipeline", [2, 4])
def test_hyper_connections_equal_stock_on_a_v(checkout: Checkout, pipeline: int, tmp_path: Path) -> None:
    own, expected = on_a_v_after(checkout, pipeline, with_hyper_connections(pipeline), tmp_path)
    same(own, expected)


@pytest.mark.parametrize("checkout", of_the_dev_branch(), ids=str)
@pytest.mark.parametrize(
    ("schedule", "own", "more"),
    [
        ("zb-h2", "--zero-bubble-offload all", ""),
        ("zb-h1", "--zero-bubble-offload all", f"--num-residual-streams 2 --bf16 {AGAIN}"),
    ],
    ids=["plain", "two streams, computed again"],
)
def test_hyper_connections_with_offloading_equal_stock(checkout: Checkout, schedule: str, own: str, more: str) -> None:
    job = checkout, 2, with_hyper_connections(2, more)
    same(pretrain_gpt(*job, schedule, tuple(own.split())), stock(*job))


@pytest.mark.parametrize("checkout", of_the_dev_branch(), ids=str)
@pytest.mark.parametrize(
    ("schedule", "own", "more"),
    [
        (
            "zero-pp",
            "--zero-bubble-shard-weights --zero-bubble-unit-microbatches 64",
            "--use-distributed-optimizer --global-batch-size 12",
        ),
        (
            "interleaved-1f1b",
            "--zero-bubble-overlap-experts",
            f"{EXPERTS} --bf16 --global-batch-size 8",
        ),
    ],
    ids=["sharded units", "pairs"],
)
def test_hyper_connections_on_two_replicas_equal_stock(checkout: Checkout, schedule: str, own: str, more: str) -> None:
    chunks = "--num-residual-streams 2 --num-virtual-stages-per-pipeline-rank 2"
    job = checkout, 4, with_hyper_connections(2, f"{chunks} {more}")
    same(pretrain_gpt(*job, schedule, tuple(own.split())), stock(*job))


@pytest.mark.parametrize("checkout", of_the_dev_branch(), ids=str)
@pytest.mark.parametrize("more", ["", f"--bf16 {AGAIN}"], ids=["plain", "computed again"])
def test_hyper_connections_with_steps_that_are_undone_equal_stock(checkout: Checkout, more: str) -> None:
    job = checkout, 2, with_hyper_connections(2, f"--num-residual-streams 2 --clip-grad 100 {more}")
    spoiled = "4:1:1e6,7:0:1e6,8:1:1e6"
    own = pretrain_gpt(*job, "zb-h2", ("--zero-bubble-post-validation",), spoiled=spoiled)
    same(own, stock(*job, (), spoiled))
    assert re.search(r"zero-bubble: post-validation: .*\d+ repeated", own.text), own.of("zero-bubble: ")


@pytest.mark.parametrize("checkout", of_the_dev_branch(), ids=str)
@pytest.mark.parametrize(
    ("schedule", "own", "more"),
    [
        ("seq-zb-h1", "--zero-bubble-num-slices 4", ""),
        ("seq-1f1b", "--zero-bubble-slice-ends 24,40,56,64", AGAIN),
        ("zb-h1", "--zero-bubble-vocabulary-parallel 2", ""),
        ("1f1b", "--zero-bubble-vocabulary-parallel 1", AGAIN),
    ],
    ids=["slices", "slices, computed again", "vocabulary", "vocabulary, computed again"],
)
def test_hyper_connections_are_near_stock(checkout: Checkout, schedule: str, own: str, more: str) -> None:
    """Slices and shards of the vocabulary add in another order."""
    job = checkout, 2, with_hyper_connections(2, f"--num-residual-streams 2 {more}")
    sliced = pretrain_gpt(*job, schedule, tuple(own.split()))
    near(sliced, stock(*job), PLAIN.rounding)
    assert sliced.weights != stock(*job).weights


@pytest.mark.parametrize("checkout", at_least(20), ids=str)
@pytest.mark.parametrize("frozen", ["", "--freeze-LM"])
def test_vision_language_model_equals_stock(checkout: Checkout, frozen: str) -> None:
    """The vision model is on the first stage, in front of the embedding."""
    expected = pretrain_vlm(checkout, None, frozen)
    assert expected.exit_codes == [0, 0], expected.text[-4000:]
    same(pretrain_vlm(checkout, "zb-h1", frozen), expected)


@pytest.mark.parametrize("checkout", at_least(20), ids=str)
def test_script_without_virtual_stages_is_refused_on_a_v(checkout: Checkout) -> None:
    refused = pretrain_vlm(checkout, "zb-v")
    assert refused.exit_codes == [1, 1]
    sentences = [line for line in refused.text.splitlines() if "several stages per rank need a script" in line]
    assert len(sentences) == 2 and all(line.startswith("zero-bubble: ") for line in sentences)
    assert sentences[0].endswith("config, pg_collection; choose a schedule with one stage per rank")


@pytest.mark.parametrize("checkout", [each for each in CHECKOUTS if each.minor == "0.16"], ids=str)
def test_encoder_and_decoder_are_refused_in_one_sentence(checkout: Checkout) -> None:
    """On all ranks, and before Megatron's own error."""
    refused = pretrain_t5(checkout, 2, "--pipeline-model-parallel-size 2", "zb-h1")
    assert refused.exit_codes == (1, 1) and refused.figures == []
    sentences = [line for line in refused.text.splitlines() if "need a model with one stack of layers" in line]
    assert len(sentences) == 2 and all(line.startswith("zero-bubble: ") for line in sentences), refused.text[-3000:]
    assert "Traceback" not in refused.text


@pytest.mark.parametrize("checkout", [each for each in CHECKOUTS if each.minor == "0.16"], ids=str)
def test_script_for_images_takes_no_configuration(checkout: Checkout) -> None:
    """Which Megatron gives every model provider, so that the script cannot start."""
    assert "def model_provider(pre_process=True, post_process=True):" in (
        checkout.path / "pretrain_vision_classify.py"
    ).read_text(encoding="utf-8")
    assert "config=config," in (checkout.path / "megatron/training/training.py").read_text(encoding="utf-8")


def pretrain_vlm(checkout: Checkout, schedule: str | None, flags: str = "") -> Log:
    """Run the checkout's ``pretrain_vlm.py`` on two ranks to its end."""
    images = "--img-h 32 --img-w 32 --patch-dim 16 --ckpt-format torch"
    job = gpt_job(checkout, 2, f"--pipeline-model-parallel-size 2 {UNTIED} {images} {flags}", schedule)
    with running(replace(job, script=checkout.path / "pretrain_vlm.py"), checkout) as ranks:
        codes = ranks.wait(500)
    return Log(ranks.text, codes)

"""Multi-token prediction, which uses one output layer several times per microbatch, must equal stock megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.engine.wgrad.test_fused import FUSED, OVERLAP, figures
from tests.helpers import parity
from tests.helpers.parity import Layout, Outcome, assert_same_bits, assert_same_model, train
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some

UNTIED = "--untie-embeddings-and-output-weights"
SCHEDULES = [None, "zb-h1", "zb-h2"]
ROPE = "--position-embedding-type rope"  # the stage with the prediction layers has no learned positions
# With the second flag every stage reads the batch, whose tokens multi-token prediction needs.
OWN_STAGE = "--pipeline-model-parallel-layout Et|tmm|L --reset-attention-mask"


def train_predicting(rank: int, flags: str, schedules: Sequence[str | None]) -> list[Outcome]:
    """Train a model that predicts two additional tokens; our training loop has no flag for that."""
    from megatron.core.models.gpt import gpt_layer_specs

    from megatron.zero_bubble.planning.job.arguments import parser as arguments
    from pretrain import model

    parse, build_gpt = arguments.parse, model.GPTModel

    def parse_predicting(argv: Sequence[str]) -> Any:
        args = parse(argv)
        args.mtp_num_layers, args.mtp_loss_scaling_factor = 2, 0.1
        return args

    def build_predicting(config: Any, transformer_layer_spec: Any, vp_stage: int | None, **rest: Any) -> Any:
        block = gpt_layer_specs.get_gpt_mtp_block_spec(config, transformer_layer_spec, False, vp_stage)
        return build_gpt(
            config=config,
            transformer_layer_spec=transformer_layer_spec,
            mtp_block_spec=block,
            vp_stage=vp_stage,
            **rest,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "parse", parse_predicting)
        patch.setattr(model, "GPTModel", build_predicting)
        return train(rank, flags, schedules)


ROWS = {
    "tied, bf16": (Layout(2), "--bf16"),
    "tied, fp32": (Layout(2), ""),
    "untied": (Layout(2), UNTIED),
    "untied, dp=2, overlap, not aligned": (Layout(2, data=2), f"{UNTIED} {OVERLAP}"),
    "on a separate stage, tied, bf16": (
        Layout(3, num_layers=2),
        f"--bf16 {OWN_STAGE}",
    ),
    "on a separate stage, tp=2 and sequence parallel": (
        Layout(3, num_layers=2, tensor=2),
        f"{UNTIED} --sequence-parallel {OWN_STAGE}",
    ),
}


@pytest.mark.parametrize("name", some(ROWS, *list(ROWS)[::3]))
def test_same_bits_as_stock(ranks: RankPool, name: str) -> None:
    layout, options = ROWS[name]
    flags = layout.flags(4, f"{ROPE} {options}")
    results = ranks.run(layout.num_ranks, train_predicting, flags, SCHEDULES, timeout=120)
    # With a tied embedding, the last stage computes its logits with the embedding's weight.
    unused = () if UNTIED in options else ("output_layer.weight",)
    assert_same_bits(results, SCHEDULES, unused=unused)


ON_A_V = [None, "zb-v"]
V_ROWS = {
    "untied, bf16": (Layout(2, num_layers=4), f"{UNTIED} --bf16"),
    "tied": (Layout(2, num_layers=4), ""),
    "tied, dp=2, distributed optimizer, both overlaps": (
        Layout(2, data=2, num_layers=4),
        f"--use-distributed-optimizer --overlap-param-gather {OVERLAP}",
    ),
    "tied, in a wave": (Layout(2, num_layers=8), ""),
}
IN_A_WAVE = "zb-auto --zero-bubble-placement wave"


@pytest.mark.parametrize("name", some(V_ROWS, "tied"))
def test_on_a_v_as_stock(ranks: RankPool, name: str) -> None:
    """The loss, and so the prediction, is on the rank that has the embedding as well."""
    layout, options = V_ROWS[name]
    schedules = [None, IN_A_WAVE] if name.endswith("in a wave") else ON_A_V
    flags = layout.flags(4, f"{ROPE} {options}")
    results = ranks.run(layout.num_ranks, train_predicting, flags, schedules, timeout=120)
    unused = () if UNTIED in options else ("output_layer.weight",)
    assert_same_model(results, schedules, layout, unused=unused)


@pytest.mark.parametrize("schedule", ["zb-v", pytest.param("interleaved-1f1b", marks=pytest.mark.full)])
def test_on_a_separate_stage_of_several_as_stock(ranks: RankPool, schedule: str) -> None:
    """The layout of DeepSeek-V3: the prediction and the loss are on stages of their own."""
    layout, schedules = Layout(3, num_layers=4), [None, schedule]
    options = "--pipeline-model-parallel-layout Et|t|t|t|mm|L --reset-attention-mask"
    flags = layout.flags(6, f"{ROPE} {UNTIED} {options} --num-virtual-stages-per-pipeline-rank 2")
    results = ranks.run(3, train_predicting, flags, schedules, timeout=120)
    assert_same_model(results, schedules, layout)
    embeddings = [outcomes[1].weights.get("embedding.word_embeddings.weight") for outcomes in results]
    first, of_prediction, other = embeddings
    assert first == of_prediction is not None and other is None, "stages 0 and 4 have the embedding, and keep it equal"


def train_logging(rank: int, flags: str, schedules: Sequence[str | None]) -> list[list[float]]:
    """Train; return the losses of the predictions that this rank would log after each run."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Helper

    logged, train_once = [], parity._train_once

    def noting(*arguments: Any) -> Any:
        result = train_once(*arguments)
        logged.append(Helper.tracker["values"].tolist() if Helper.tracker else [])
        if Helper.tracker:
            assert Helper.tracker["avg_group"] is not None, "Megatron takes the mean over the replicas"
        Helper.tracker.clear()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "_train_once", noting)
        train_predicting(rank, flags, schedules)
    return logged


def test_losses_of_predictions_are_logged_on_the_last_rank(ranks: RankPool) -> None:
    flags = Layout(2, num_layers=4).flags(4, f"{ROPE} {UNTIED}")
    first, last = ranks.run(2, train_logging, flags, [None, "zb-v"], timeout=120)
    assert first == [[], []]
    stock, own = last
    assert len(stock) == 2 and min(stock) > 1
    assert own == pytest.approx(stock, rel=1e-6)  # sums of iterations, instead of one sum over all


@pytest.mark.full
def test_interleaved_as_stock(ranks: RankPool) -> None:
    schedules = [None, "interleaved-1f1b"]
    flags = Layout(2, num_layers=4).flags(4, f"{ROPE} --num-virtual-stages-per-pipeline-rank 2")
    results = ranks.run(2, train_predicting, flags, schedules, timeout=120)
    assert_same_bits(results, schedules, unused=("output_layer.weight",))


BY_DEFAULT = [("tied, bf16", 2e-2), ("untied", 1e-5), ("untied, dp=2, overlap, not aligned", 1e-5)]
"""Rows, and their tolerances."""


@pytest.mark.parametrize(("name", "tolerance"), some(BY_DEFAULT, BY_DEFAULT[1]))
def test_near_stock_by_default(ranks: RankPool, name: str, tolerance: float) -> None:
    layout, options = ROWS[name]
    flags = layout.flags(4, f"{ROPE} {options} {FUSED}")
    for stock, *fused in ranks.run(layout.num_ranks, train_predicting, flags, SCHEDULES, timeout=120):
        for own in fused:
            assert figures(own.losses) == pytest.approx(figures(stock.losses), rel=tolerance)
            assert figures(own.grad_norms) == pytest.approx(figures(stock.grad_norms), rel=tolerance)


def train_counting(
    rank: int, flags: str, run: Callable[..., list[Outcome]], schedules: Sequence[str | None]
) -> tuple[list[Outcome], list[int]]:
    """Train; return the outcomes, and how often each weight became ready per iteration."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup

    counts: list[int] = []
    start = BucketGroup.start_grad_sync

    def noted_start(self: Any, *arguments: Any, **named: Any) -> None:
        counts.extend(self.per_param_grad_ready_counts.values())
        start(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketGroup, "start_grad_sync", noted_start)
        return run(rank, flags, schedules), counts


@pytest.mark.parametrize("options", some(["", FUSED], ""))
def test_weight_used_several_times_is_ready_once(ranks: RankPool, options: str) -> None:
    """megatron-core 0.13 to 0.15 allow a weight to be ready only once; later versions expect the same number."""
    flags = Layout(2, data=2).flags(4, f"{ROPE} {UNTIED} {OVERLAP} {options}")
    for _, counts in ranks.run(4, train_counting, flags, train_predicting, ["zb-h1"], timeout=120):
        assert set(counts) == {1}


SHARDED = "--zero-bubble-shard-weights --zero-bubble-unit-microbatches 4"
AND_LOSS = "Ett|tt|mm|L --reset-attention-mask"
TWO_REPLICAS = Layout(2, data=2, num_layers=4)
SHARDED_ROWS = {
    "untied, bf16": ("zero-pp", TWO_REPLICAS, f"{UNTIED} --bf16 --num-virtual-stages-per-pipeline-rank 2", None),
    "tied": ("zero-pp", TWO_REPLICAS, "--num-virtual-stages-per-pipeline-rank 2", None),
    "tied, on a V": ("zb-v", TWO_REPLICAS, "", "zb-v"),
    "on a separate stage, next to the loss": (
        "zero-pp",
        TWO_REPLICAS,
        f"{UNTIED} --num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout {AND_LOSS}",
        None,
    ),
}


@pytest.mark.parametrize("name", some(SHARDED_ROWS, "tied"))
def test_shards_have_the_bits_of_whole_weights(ranks: RankPool, name: str) -> None:
    """The copies of the embedding add up their gradients, whichever ranks have them."""
    schedule, layout, options, whole = SHARDED_ROWS[name]
    schedules = [whole, f"{schedule} {SHARDED}"]
    flags = layout.flags(4, f"{ROPE} --use-distributed-optimizer --clip-grad 1.0 {options}")
    results = ranks.run(layout.num_ranks, train_predicting, flags, schedules, timeout=200)
    assert_same_bits(results, schedules, unused=() if UNTIED in options else ("output_layer.weight",))

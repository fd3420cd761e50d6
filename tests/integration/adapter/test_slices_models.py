"""Slices of models with latent attention, experts and predictions, against stock megatron-core on whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.helpers.deepseek import Model, built
from tests.helpers.parity import Layout
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.helpers.slices import Difference, differences
from tests.integration.adapter.test_parity import EXPERTS, ROPE, UNTIED
from tests.integration.adapter.test_slices import EVEN, FULL_RECOMPUTE, MANY, UNEVEN, check


def of_model(rank: int, model: Model, flags: str, schedules: Sequence[str]) -> list[Difference]:
    """As ``differences``, for a model that has more than its flags say; call it on a rank pool."""
    with built(model):
        return differences(rank, flags, schedules)


FOUR = [f"seq-zb-h1 {EVEN.format(4)}", f"seq-zb-h1 {UNEVEN}"]
LATENT = f"{ROPE} {UNTIED} --qk-layernorm --no-rope-fusion"
DEEPSEEK = (
    f"{LATENT} {EXPERTS} --init-method-std 0.1 --moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 0.001"
)
_ROUTER = (
    ("moe_router_score_function", "sigmoid"),
    ("moe_router_enable_expert_bias", True),
    ("moe_shared_expert_intermediate_size", 8),
)
ROWS = {
    "DeepSeek-V3: latent attention, biased experts, losses of sequences, a prediction": (
        Model(latent=True, predictions=1, fields=_ROUTER),
        Layout(2),
        2,
        DEEPSEEK,
        FOUR,
    ),
    "the same on four ranks, two stages per rank": (
        Model(latent=True, predictions=1, fields=_ROUTER),
        Layout(4, num_layers=8),
        4,
        DEEPSEEK,
        [*FOUR, f"seq-interleaved-1f1b {EVEN.format(4)}"],
    ),
    "latent attention, up-projection recomputed": (
        Model(latent=True, changes=(("recompute_modules", ["mla_up_proj"]),)),
        Layout(2),
        2,
        f"{LATENT} --recompute-granularity selective",
        MANY,
    ),
    "latent attention, yarn": (Model(latent=True, fields=(("rope_type", "yarn"),)), Layout(2), 2, LATENT, MANY),
    "two predictions, per-token loss": (
        Model(predictions=2),
        Layout(2),
        2,
        f"{ROPE} {UNTIED} --calculate-per-token-loss",
        MANY,
    ),
    "two predictions, tied, full recompute, p=4": (
        Model(predictions=2),
        Layout(4),
        4,
        f"{ROPE} {FULL_RECOMPUTE}",
        MANY,
    ),
    "predictions on a stage of their own": (
        Model(predictions=2),
        Layout(3, num_layers=2),
        3,
        f"{ROPE} {UNTIED} --pipeline-model-parallel-layout Et|tmm|L --reset-attention-mask",
        MANY,
    ),
    "predictions, tp=2 and sequence parallel": (
        Model(predictions=2),
        Layout(2, tensor=2),
        2,
        f"{ROPE} {UNTIED} --sequence-parallel",
        MANY,
    ),
}


@pytest.mark.parametrize("name", some(ROWS, next(iter(ROWS))))
def test_gradients_equal_those_of_whole_sequences(ranks: RankPool, name: str) -> None:
    model, layout, num_microbatches, options, schedules = ROWS[name]
    flags = layout.flags(num_microbatches, options)
    check(ranks.run(layout.num_ranks, of_model, model, flags, schedules, timeout=240))

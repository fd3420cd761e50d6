"""A divided vocabulary of models with latent attention, experts and predictions, against whole layers of stock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.helpers.deepseek import Model, built
from tests.helpers.parity import Layout
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.helpers.slices import Difference
from tests.helpers.vocabulary import differences
from tests.integration.adapter.test_parity import EXPERTS, ROPE, UNTIED
from tests.integration.adapter.test_vocabulary import FEW, FULL_RECOMPUTE, PADDING, check, divided


def of_model(rank: int, model: Model, flags: str, schedules: Sequence[str]) -> list[Difference]:
    """As ``differences``, for a model that has more than its flags say; call it on a rank pool."""
    with built(model):
        return differences(rank, flags, schedules)


LATENT = f"{ROPE} {UNTIED} --qk-layernorm --no-rope-fusion"
DEEPSEEK = f"{LATENT} {EXPERTS} --moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 0.001"
ROUTER = (
    ("moe_router_score_function", "sigmoid"),
    ("moe_router_enable_expert_bias", True),
    ("moe_shared_expert_intermediate_size", 8),
)
ROWS = {
    "DeepSeek-V3: latent attention, biased experts, a prediction, padding": (
        Model(latent=True, predictions=1, fields=ROUTER),
        Layout(2),
        3,
        f"{DEEPSEEK} {PADDING}",
        FEW,
    ),
    "Kimi K2: latent attention, experts": (Model(latent=True, fields=ROUTER), Layout(2), 3, DEEPSEEK, FEW),
    "two stages per rank, a prediction, tied": (
        Model(predictions=1),
        Layout(2, num_layers=4),
        3,
        ROPE,
        divided("zb-v", "interleaved-1f1b")[1:3],
    ),
    "two predictions, tied, full recompute, p=4": (
        Model(predictions=2),
        Layout(4),
        5,
        f"{ROPE} {FULL_RECOMPUTE}",
        FEW,
    ),
    "latent attention, a prediction, on a V of four ranks": (
        Model(latent=True, predictions=1),
        Layout(4, num_layers=8),
        5,
        LATENT,
        divided("zb-v"),
    ),
    "predictions on a stage of their own, per-token loss": (
        Model(predictions=2),
        Layout(3, num_layers=2),
        3,
        f"{ROPE} {UNTIED} --calculate-per-token-loss --pipeline-model-parallel-layout Et|tmm|L --reset-attention-mask",
        FEW,
    ),
    "predictions, tp=2 and sequence parallel, padding": (
        Model(predictions=2),
        Layout(2, tensor=2),
        3,
        f"{ROPE} {UNTIED} --sequence-parallel {PADDING}",
        FEW,
    ),
}


@pytest.mark.parametrize("name", some(ROWS, next(iter(ROWS))))
def test_gradients_equal_those_of_whole_layers(ranks: RankPool, name: str) -> None:
    model, layout, num_microbatches, options, schedules = ROWS[name]
    flags = layout.flags(num_microbatches, options)
    check(ranks.run(layout.num_ranks, of_model, model, flags, schedules, timeout=240))

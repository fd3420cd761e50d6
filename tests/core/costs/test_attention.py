"""Tests of the shapes of attention."""

from __future__ import annotations

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.core.costs.attention import Attention, Latent
from megatron.zero_bubble.core.costs.expert_layers import Experts
from megatron.zero_bubble.core.costs.model import Model

DEEPSEEK = Latent(1536, 512)


def test_groups_share_keys_and_values() -> None:
    own = Attention.of_heads(4096, 32, 8, 128)
    assert (own.queries, own.keys, own.values, own.outputs) == (4096, 1024, 1024, 4096)
    assert own.weights == 4096 * (4096 + 2 * 1024 + 4096) and own.rank_weights(4) == own.weights / 4


def test_projections_down_are_whole_on_every_rank() -> None:
    """Those of DeepSeek-V3's published weights."""
    own = DEEPSEEK.of(7168, 128)
    down, up, out = 7168 * 1536 + 7168 * 576, 1536 * 128 * 192 + 512 * 128 * 256, 128 * 128 * 7168
    assert (own.weights, own.whole_weights, own.up_weights) == (down + up + out, down, up)
    assert own.rank_weights(2) == down + (up + out) / 2
    direct = Latent(None, 512).of(7168, 128)
    assert direct.up_weights == 7168 * 128 * 192 + 512 * 128 * 256 and direct.compressed == 512


def test_deepseek_v3_has_671_billion_weights() -> None:
    experts = Experts(256, 8, 2048, 2048, layers=(False,) * 3 + (True,) * 58)
    model = Model((61,), 7168, 18432, 128, 128, 56, 4096, 1, 129_280, gated=True, experts=experts, latent=DEEPSEEK)
    assert sum(model.weights(Placement.linear(1))) == pytest.approx(671e9, rel=1e-3)


def test_projections_are_the_weights_before_attention() -> None:
    own, out = DEEPSEEK.of(7168, 128), 128 * 128 * 7168
    rows = DEEPSEEK.projections(7168, 128)
    assert sum(inputs * outputs for _, inputs, outputs in rows) == own.weights - out
    assert Latent(None, 512).projections(7168, 128)[0] == ("linear_q_proj", 7168, 128 * 192)


def test_ranks_that_have_all_tokens_repeat_the_projections_down() -> None:
    own = DEEPSEEK.of(7168, 128)
    assert own.computed(8, 8) == own.computed(1, 1) == own.weights
    assert own.computed(8, 1) / 8 == own.rank_weights(8)

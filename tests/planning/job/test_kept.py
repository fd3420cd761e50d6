"""Tests of what decides which tensors of a job are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.core.costs.attention import Latent
from megatron.zero_bubble.core.costs.kept import Kept
from megatron.zero_bubble.core.costs.precision import BF16, PRECISIONS
from megatron.zero_bubble.planning.job.kept import kept_of, latent_of, linear_precision


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, None),
        ({"fp8": None, "fp8_recipe": "mxfp8"}, None),
        ({"fp8": "hybrid"}, "tensorwise"),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "delayed"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "mxfp8"),
        ({"fp8": "e4m3", "fp8_recipe": SimpleNamespace(value="mxfp8")}, "mxfp8"),
        ({"fp4": "e2m1"}, "nvfp4"),
    ],
)
def test_precision(options: dict[str, Any], name: str | None) -> None:
    assert linear_precision(SimpleNamespace(**options)) == (BF16 if name is None else PRECISIONS[name])


def test_modules_and_dropout() -> None:
    assert kept_of(SimpleNamespace(recompute_modules=None)) == Kept()
    own = SimpleNamespace(recompute_modules=["moe", "mlp"], hidden_dropout=0.0, fp8="hybrid")
    assert kept_of(own) == Kept(("moe", "mlp"), 1.0, dropout=False)
    assert kept_of(SimpleNamespace(recompute_modules=[])).modules == ()


def test_latent_attention() -> None:
    assert latent_of(SimpleNamespace()) is latent_of(SimpleNamespace(multi_latent_attention=False)) is None
    sizes = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_head_dim": 4, "qk_pos_emb_head_dim": 3, "v_head_dim": 2}
    assert latent_of(SimpleNamespace(multi_latent_attention=True, **sizes)) == Latent(6, 5, 4, 3, 2)

"""What a Megatron configuration may not ask for beside a zero-bubble schedule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.zero_bubble.config import check_model_config


@pytest.mark.parametrize(
    "option, sentence",
    [
        ("delay_wgrad_compute", "it defers W a second time; got True; drop --delay-wgrad-compute"),
        ("overlap_dispatch_backward_with_experts_wgrad", "runs the W of experts inside their B; got True; drop"),
        ("use_transformer_engine_op_fuser", "whose gradients wait for W; got True; drop --use-transformer-engine-op"),
    ],
)
def test_weight_gradients_are_delayed_by_one_only(option: str, sentence: str) -> None:
    check_model_config(SimpleNamespace())
    check_model_config(SimpleNamespace(**{option: False}))
    with pytest.raises(ValueError, match=f"need {option}=False because .*{sentence}"):
        check_model_config(SimpleNamespace(**{option: True}))

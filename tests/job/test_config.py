"""What a Megatron configuration may not ask for beside a zero-bubble schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.job.config import ZeroBubbleConfig, check_model_config


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


@pytest.mark.parametrize(
    "option, sentence",
    [
        ("moe_paged_stash", "Megatron resets its pages at the head of its own iterations; got True; drop --moe-paged"),
        ("overlap_p2p_comm_warmup_flush", "in the order of the schedule; got True; drop --overlap-p2p-communication-"),
    ],
)
def test_options_of_megatrons_own_iterations(option: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"need {option}=False because .*{sentence}"):
        check_model_config(SimpleNamespace(**{option: True}))


def test_a_group_size_that_is_not_megatrons_default() -> None:
    for size in (None, 4):
        check_model_config(SimpleNamespace(pipeline_model_parallel_size=4, microbatch_group_size_per_vp_stage=size))
    with pytest.raises(ValueError, match="--microbatch-group-size-per-virtual-pipeline-stage 3 and 4 ranks; drop"):
        check_model_config(SimpleNamespace(pipeline_model_parallel_size=4, microbatch_group_size_per_vp_stage=3))


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"memory_limit": "0.25p"}, "the memory limit '0.25p' is for zb-auto; other schedules .* leave it out"),
        ({"placement": "vee"}, "the placement 'vee' is for zb-auto"),
        ({"rollback": "inverse"}, "the rollback 'inverse' is for post_validation, which is not asked for"),
    ],
)
def test_options_of_another_configuration(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ZeroBubbleConfig("zb-h1", **options)

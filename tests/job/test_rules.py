"""Tests of the rules for Megatron options that zero-bubble schedules do not support."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.job.config import ZeroBubbleConfig
from megatron.zero_bubble.job.flags import parse_ours
from megatron.zero_bubble.job.rules import Job, check_flags, check_options


@pytest.mark.parametrize(
    "option, sentence",
    [
        ("delay_wgrad_compute", "already defers weight gradients; got True; drop --delay-wgrad-compute"),
        ("overlap_dispatch_backward_with_experts_wgrad", "runs the W of experts inside their B; got True; drop"),
        ("use_transformer_engine_op_fuser", "must defer to W; got True; drop --use-transformer-engine-op"),
    ],
)
def test_other_delays_of_weight_gradients_are_rejected(option: str, sentence: str) -> None:
    check_options(SimpleNamespace())
    check_options(SimpleNamespace(**{option: False}))
    with pytest.raises(ValueError, match=f"need {option}=False, because .*{sentence}"):
        check_options(SimpleNamespace(**{option: True}))


@pytest.mark.parametrize(
    "option, sentence",
    [
        ("moe_paged_stash", "Megatron resets the pages only in its own schedules; got True; drop --moe-paged"),
        ("overlap_p2p_comm_warmup_flush", "overlap with messages; got True; drop --overlap-p2p-communication-"),
    ],
)
def test_options_of_megatrons_own_schedules_are_rejected(option: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"need {option}=False, because .*{sentence}"):
        check_options(SimpleNamespace(**{option: True}))


def test_nondefault_microbatch_group_size_is_rejected() -> None:
    job = SimpleNamespace(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    for job.microbatch_group_size_per_vp_stage in (None, 4):
        check_options(job)
    job.microbatch_group_size_per_vp_stage = 3
    with pytest.raises(ValueError, match="--microbatch-group-size-per-virtual-pipeline-stage 3 and 4 ranks; drop"):
        check_options(job)
    job.virtual_pipeline_model_parallel_size = None  # without virtual stages Megatron has no groups either
    check_options(job)


def test_multi_token_prediction_on_a_v_is_rejected() -> None:
    values = SimpleNamespace(mtp_num_layers=1)
    check_options(values)
    with pytest.raises(ValueError, match="stages on a V need mtp_num_layers=None, because .* got 1; drop --mtp-num-l"):
        check_options(values, in_place=False)


@pytest.mark.parametrize(
    "option, value",
    [
        ("qk_clip", True),
        ("log_max_attention_logit", True),
        ("reuse_grad_buf_for_mxfp8_param_ag", True),
        ("optimizer_cpu_offload", True),
        ("optimizer_cuda_graph", True),
        ("perform_rl_step", True),
        ("vision_pretraining", True),
        ("moe_routing_trace_path", "traces"),
    ],
)
def test_options_that_post_validation_cannot_undo_are_rejected(option: str, value: object) -> None:
    values = SimpleNamespace(**{option: value})
    check_options(values)
    sentence = f"schedules with post-validation need {option}=.* got {value!r}; drop --{option.replace('_', '-')}"
    with pytest.raises(ValueError, match=sentence):
        check_options(values, post_validation=True)


def test_delayed_scaling_is_rejected_with_post_validation() -> None:
    for recipe in ("delayed", SimpleNamespace(value="delayed")):  # a flag, and an enumeration
        values = SimpleNamespace(fp8="hybrid", fp8_recipe=recipe)
        check_options(values)
        with pytest.raises(ValueError, match="got --fp8-format hybrid --fp8-recipe delayed; give --fp8-recipe tensorw"):
            check_options(values, post_validation=True)
    for fine in (
        SimpleNamespace(fp8="hybrid", fp8_recipe="tensorwise"),
        SimpleNamespace(fp8=None, fp8_recipe="delayed"),
    ):
        check_options(fine, post_validation=True)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("context_parallel_size", 2),
        ("mtp_num_layers", 1),
        ("label_smoothing_factor", 0.1),
        ("logits_save_dir", "logits"),
        ("defer_embedding_wgrad_compute", True),
        ("use_mup", True),
    ],
)
def test_vocabulary_parallelism_refuses_options(option: str, value: object) -> None:
    values = SimpleNamespace(**{option: value})
    check_options(values)
    with pytest.raises(UserError, match=f"schedules with vocabulary parallelism need {option}="):
        check_options(values, vocabulary=True)


@pytest.mark.parametrize(
    ("flags", "under_launcher", "words"),
    [
        ("", False, "needs a zero-bubble schedule, into which its passes are inserted"),
        ("", True, "needs a zero-bubble schedule, into which its passes are inserted"),
    ],
)
def test_vocabulary_parallelism_refuses_flags(flags: str, under_launcher: bool, words: str) -> None:
    options, _ = parse_ours([*flags.split(), "--zero-bubble-vocabulary-parallel", "2"])
    with pytest.raises(UserError, match=words):
        check_flags(Job(options, under_launcher=under_launcher))
    options, _ = parse_ours(["--zero-bubble-schedule", "zb-h1", "--zero-bubble-vocabulary-parallel", "off"])
    check_flags(Job(options, under_launcher=under_launcher))


@pytest.mark.parametrize("given", [{"schedule": "zb-auto"}, {"schedule": "seq-zb-h1"}, {"schedule_file": "file"}])
def test_vocabulary_parallelism_needs_a_named_schedule_of_whole_sequences(given: dict[str, str]) -> None:
    with pytest.raises(UserError, match="vocabulary parallelism needs a schedule of whole sequences"):
        ZeroBubbleConfig(vocabulary=2, **given)  # type: ignore[arg-type]

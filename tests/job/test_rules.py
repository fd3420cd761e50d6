"""Tests of the rules for Megatron options that zero-bubble schedules do not support."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.formats.plan import plan_to_json
from megatron.zero_bubble.ir import Kind
from megatron.zero_bubble.job.config import ZeroBubbleConfig
from megatron.zero_bubble.job.flags import config_of, parse_ours
from megatron.zero_bubble.job.options import check_options
from megatron.zero_bubble.job.planned import adopt
from megatron.zero_bubble.job.rules import Job, check_flags
from megatron.zero_bubble.job.runnable import check_runnable
from megatron.zero_bubble.job.stages import place_stages
from tests.planning.test_source import divided_plan


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
        ("logits_load_dir", "logits"),
        ("defer_embedding_wgrad_compute", True),
        ("use_mup", True),
        ("init_model_with_meta_device", True),
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


def test_recomputed_logits_need_vocabulary_parallelism() -> None:
    recompute = ["--zero-bubble-recompute-logits", "--zero-bubble-schedule", "zb-h1"]
    for flags in ([], ["--zero-bubble-vocabulary-parallel", "off"]):
        with pytest.raises(UserError, match="--zero-bubble-recompute-logits has no effect without vocabulary"):
            check_flags(Job(parse_ours([*recompute, *flags])[0]))
    with pytest.raises(UserError, match="recompute_logits has no effect without vocabulary parallelism"):
        ZeroBubbleConfig("zb-h1", recompute_logits=True)
    options, _ = parse_ours([*recompute, "--zero-bubble-vocabulary-parallel", "1"])
    check_flags(Job(options))
    assert config_of(options).recompute_logits


@pytest.mark.parametrize("given", [{"schedule": "seq-zb-h1"}, {"schedule": "zb-auto", "num_slices": 2}])
def test_vocabulary_parallelism_needs_whole_sequences(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="vocabulary parallelism needs a schedule of whole sequences"):
        ZeroBubbleConfig(vocabulary=2, **given)


def test_vocabulary_of_a_schedule_file_cannot_be_left_undivided(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan_to_json(divided_plan(2)))
    job = SimpleNamespace(pipeline_model_parallel_size=2)
    for flags in ([], ["--zero-bubble-vocabulary-parallel", "2"]):
        options, _ = parse_ours(["--zero-bubble-schedule-file", str(file), *flags])
        adopt(options)
        assert place_stages(options, job, None, 1.0)[1].vocabulary == 2
    options, _ = parse_ours(["--zero-bubble-schedule-file", str(file), "--zero-bubble-vocabulary-parallel", "off"])
    with pytest.raises(UserError, match="-vocabulary-parallel must be that of the schedule file, 2; got off with"):
        adopt(options)


@pytest.mark.parametrize("kind", ["I", "S", "T", "J"])
def test_passes_of_the_vocabulary_must_be_in_the_order_of_the_data(kind: str) -> None:
    schedule = divided_plan(2).schedule
    check_runnable(schedule, 2, 3)
    places = [at for at, p in enumerate(schedule.order[0]) if p.kind is Kind(kind)]
    row = list(schedule.order[0])
    row[places[0]], row[places[1]] = row[places[1]], row[places[0]]
    with pytest.raises(UserError, match=f"runs the {kind} passes of rank 0 for microbatches 1, 0, 2; sort them"):
        check_runnable(replace(schedule, order=(tuple(row), schedule.order[1])), 2, 3)

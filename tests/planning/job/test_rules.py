"""Tests of the rules for Megatron options that zero-bubble schedules do not support."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.ir import Kind
from megatron.zero_bubble.planning.job.flags import parse_ours
from megatron.zero_bubble.planning.job.options import check_options
from megatron.zero_bubble.planning.job.runnable import check_runnable
from megatron.zero_bubble.planning.job.stages import place_stages
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Setup, Validated
from tests.planning.test_source import divided_plan


def test_nondefault_microbatch_group_size_is_rejected() -> None:
    job = SimpleNamespace(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    for job.microbatch_group_size_per_vp_stage in (None, 4):
        check_options(job, RunOptions())
    job.microbatch_group_size_per_vp_stage = 3
    with pytest.raises(ValueError, match="--microbatch-group-size-per-virtual-pipeline-stage 3 and 4 ranks; drop"):
        check_options(job, RunOptions())
    job.virtual_pipeline_model_parallel_size = None  # without virtual stages Megatron has no groups either
    check_options(job, RunOptions())


def test_fine_grained_offloading_needs_one_stage_per_rank() -> None:
    """With one, backwards come in the order of the microbatches, as Megatron's manager expects them."""
    job = SimpleNamespace(pipeline_model_parallel_size=4, fine_grained_activation_offloading=True)
    check_options(job, RunOptions())
    job.virtual_pipeline_model_parallel_size = 2
    with pytest.raises(UserError, match="got --fine-grained-activation-offloading and 2 stages per rank; drop it, or"):
        check_options(job, RunOptions())


def test_graphs_of_rollouts_are_accepted() -> None:
    """Megatron turns them off for training; other jobs, and --rl-training-cuda-graphs, capture training."""
    asked = {"cuda_graph_impl": "local", "num_experts": 8}
    rollouts = SimpleNamespace(**asked, perform_rl_step=True, rl_training_cuda_graphs=False)
    check_options(rollouts, RunOptions())
    for name in ("perform_rl_step", "rl_training_cuda_graphs"):
        values = SimpleNamespace(**{**vars(rollouts), name: not getattr(rollouts, name)})
        with pytest.raises(UserError, match="got 'local'; .* with --perform-rl-step, drop --rl-training-cuda-graphs"):
            check_options(values, RunOptions())


def test_delayed_scaling_is_rejected_with_post_validation() -> None:
    for recipe in ("delayed", SimpleNamespace(value="delayed")):  # a flag, and an enumeration
        values = SimpleNamespace(fp8="hybrid", fp8_recipe=recipe)
        check_options(values, RunOptions())
        with pytest.raises(ValueError, match="got --fp8-format hybrid --fp8-recipe delayed; give --fp8-recipe tensorw"):
            check_options(values, RunOptions(Setup(step=Validated())))
    for fine in (
        SimpleNamespace(fp8="hybrid", fp8_recipe="tensorwise"),
        SimpleNamespace(fp8=None, fp8_recipe="delayed"),
    ):
        check_options(fine, RunOptions(Setup(step=Validated())))


def test_vocabulary_of_a_schedule_file_cannot_be_left_undivided(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan_to_json(divided_plan(2)))
    job = SimpleNamespace(pipeline_model_parallel_size=2)
    for flags in ([], ["--zero-bubble-vocabulary-parallel", "2"]):
        run, _ = parse_ours(["--zero-bubble-schedule-file", str(file), *flags])
        assert place_stages(run, job, None, 1.0)[1].setup.algorithm == 2
    with pytest.raises(UserError, match="-vocabulary-parallel must be that of the schedule file, 2; got off with"):
        parse_ours(["--zero-bubble-schedule-file", str(file), "--zero-bubble-vocabulary-parallel", "off"])


@pytest.mark.parametrize("kind", ["I", "S", "T", "J"])
def test_passes_of_the_vocabulary_must_be_in_the_order_of_the_data(kind: str) -> None:
    schedule = divided_plan(2).schedule
    check_runnable(schedule, 2, 3)
    places = [at for at, p in enumerate(schedule.order[0]) if p.kind is Kind(kind)]
    row = list(schedule.order[0])
    row[places[0]], row[places[1]] = row[places[1]], row[places[0]]
    with pytest.raises(
        UserError, match=f"its {kind} passes in the order of the data, .* of stage 0 in the order 1, 0, 2; sort them"
    ):
        check_runnable(replace(schedule, order=(tuple(row), schedule.order[1])), 2, 3)

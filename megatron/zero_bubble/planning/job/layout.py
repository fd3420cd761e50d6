"""The layers of the stages of a job, where its plan file decides them."""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout import stage_layers
from megatron.zero_bubble.core.formats.layout_string import layout_layers
from megatron.zero_bubble.core.formats.plan import PlanFile
from megatron.zero_bubble.planning.job.hybrid import take_pattern
from megatron.zero_bubble.planning.job.pattern import pattern_of

_LAYOUT = "--pipeline-model-parallel-layout"
_DIVIDING = {
    _LAYOUT: ("pipeline_model_parallel_layout",),
    "--decoder-first-pipeline-num-layers": (
        "decoder_first_pipeline_num_layers",
        "num_layers_in_first_pipeline_stage",
    ),
    "--decoder-last-pipeline-num-layers": ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"),
    "--account-for-embedding-in-pipeline-split": ("account_for_embedding_in_pipeline_split",),
    "--account-for-loss-in-pipeline-split": ("account_for_loss_in_pipeline_split",),
}
"""The flags that divide layers, and their names in a job's arguments."""
_VIRTUAL = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")


def take_layout(job: Any, plan: PlanFile, file: str) -> None:
    """Set the job's ``--pipeline-model-parallel-layout`` to the plan's, unless its flags give the same layers.

    Raises:
        UserError: a plan for another number of layers, or flags that give stages other layers.
    """
    if plan.layout is None:
        return
    layers, num_layers = layout_layers(plan.layout), job.num_layers
    if (pattern := pattern_of(job)) is not None:
        take_pattern(job, pattern, plan, layers, file)
        return
    if sum(layers) != num_layers:
        raise UserError(
            f"the plan in {file} is for {sum(layers)} layers, but the job has --num-layers {num_layers}; plan the "
            "schedule for this model"
        )
    predictions = getattr(job, "mtp_num_layers", None) or 0
    layout = plan.layout if "m" in plan.layout else f"{plan.layout[:-1]}{'m' * predictions}L"
    given = {flag: value for flag, names in _DIVIDING.items() if (value := _first(job, names)) not in (None, False)}
    if (own := given.get(_LAYOUT)) is not None:
        alike = layout_layers(own) == layers
    else:
        first, last, embedding, loss = (given.get(flag) for flag in list(_DIVIDING)[1:])
        of_ends: dict[str, Any] = {"first": first, "last": last, "embedding": bool(embedding), "loss": bool(loss)}
        alike = stage_layers(plan.schedule.placement, num_layers, **of_ends) == layers
    if alike:
        return
    if given:
        flag, value = next(iter(given.items()))
        raise UserError(
            f"the stages must have the layers of the plan in {file}; got {flag}{'' if value is True else f' {value}'}; "
            f"give {_LAYOUT} '{layout}' instead, or leave all flags that divide layers out"
        )
    job.pipeline_model_parallel_layout = layout
    for name in _VIRTUAL:  # which Megatron takes from the layout, and refuses together with it
        if hasattr(job, name):
            setattr(job, name, None)


def _first(job: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(job, name, None)) is not None), None)

"""The stages of a run of Megatron-Bridge: what its model configuration says of them, and what the schedule needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout_string import read_layout
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.planning.exclusions import PAIRS
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.model import uneven_layout
from megatron.zero_bubble.planning.job.options import check_options_of
from megatron.zero_bubble.planning.job.stages import place_stages
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.source import ScheduleSource

_LETTERS = {"embedding": "E", "mtp": "m", "loss": "L"}
"""The letters of layers in a layout; all other layers are ``t``."""
_OF_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def place(model: Any, run: RunOptions, peer_timeout_s: float) -> tuple[ZeroBubbleConfig, ScheduleSource]:
    """Place the stages of a run, and give its model configuration as many stages per rank as the schedule has.

    Called before Megatron-Bridge validates the configuration.

    Args:
        model: the run's ``config.model``, a provider or a ``ModelConfig``.
        run: what the variables ask for.
        peer_timeout_s: timeout of messages between ranks.

    Raises:
        UserError: as ``place_stages``; or a hybrid model whose layers the schedule would divide otherwise.
    """
    layout = _text(getattr(model, "pipeline_model_parallel_layout", None))
    asked = _stages_per_rank(model, layout)
    fields = ("pipeline_model_parallel_size", "num_layers", "mtp_num_layers", *_OF_ENDS, *_COUNTED)
    job = SimpleNamespace(
        pipeline_model_parallel_layout=layout, **{name: getattr(model, name, None) for name in fields}
    )
    config, source = place_stages(run, job, asked, peer_timeout_s)
    placement = source.placement
    chunks = placement.num_stages // placement.num_ranks
    if job.pipeline_model_parallel_layout != layout:  # the plan file's
        model.pipeline_model_parallel_layout = job.pipeline_model_parallel_layout
        model.virtual_pipeline_model_parallel_size = None
    elif chunks > 1 and asked is None:
        _ask_for(chunks, placement, model, run)
    return config, source


def _stages_per_rank(model: Any, layout: str | None) -> int | None:
    """The stages per rank that the configuration sets; None if it sets none."""
    if (size := model.virtual_pipeline_model_parallel_size) is not None:
        return int(size)
    return None if layout is None else len(read_layout(layout)) // int(model.pipeline_model_parallel_size)


def _ask_for(chunks: int, placement: Placement, model: Any, run: RunOptions) -> None:
    """Set ``chunks`` stages per rank: of equal size, or else with layers balanced by their work."""
    pattern = getattr(model, "hybrid_layer_pattern", None) or getattr(model, "hybrid_override_pattern", None)
    if pattern is not None:
        if PAIRS.is_made(run):  # which one stage per rank would not make possible
            check_options_of(PAIRS, model)
        raise UserError(
            "a hybrid model has the stages of its layer pattern, and this schedule needs "
            f"{placement.num_stages} of them; got {pattern!r}; choose a schedule with one stage per rank"
        )
    counted = model.num_layers + sum(bool(getattr(model, name, False)) for name in _COUNTED)
    if any(getattr(model, name, None) is not None for name in _OF_ENDS) or counted % placement.num_stages == 0:
        model.virtual_pipeline_model_parallel_size = chunks
        return
    model.pipeline_model_parallel_layout = uneven_layout(model, placement, None)
    for name in _COUNTED:  # the layout already includes embedding and loss
        setattr(model, name, False)


def _text(layout: Any) -> str | None:
    """A pipeline layout, in any form that megatron-core takes, as a string; None for no layout."""
    layout = getattr(layout, "input_data", layout)
    if layout is None or isinstance(layout, str):
        return layout
    return "|".join("".join(_LETTERS.get(getattr(layer, "name", layer), "t") for layer in stage) for stage in layout)

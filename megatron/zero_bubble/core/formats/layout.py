"""The number of layers per stage, including uneven divisions such as 46 layers on 16 ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.files import is_text, read_key
from megatron.zero_bubble.core.formats.layout_string import layers_of, layout_layers, predictions_of, write_layout
from megatron.zero_bubble.core.ir import Placement

LAYOUT = "pipeline_model_parallel_layout"
NEEDED_LAYOUT = "needed_layout"
LAYERS = "layers_per_stage"


def layout_from(content: Mapping[str, Any], placement: Placement) -> str | None:
    """Read the layout in a plan's JSON, chosen by cost or needed by the job; None if the plan has none.

    Raises:
        UserError: a layout that is not written as Megatron's flag, or for another number of stages than the plan's.
    """
    key = next((key for key in (LAYOUT, NEEDED_LAYOUT) if key in content), None)
    if key is None:
        return None
    text = str(read_key(content, key, "a string, such as Ett|ttL", is_text))
    layers = layout_layers(text)
    if len(layers) != placement.num_stages:
        raise UserError(
            f"{key} must have one part per stage, {placement.num_stages}; got {len(layers)} in {text!r}; remove it"
        )
    if content.get(LAYERS, list(layers)) != list(layers):
        raise UserError(
            f"{LAYERS} must agree with {key}, which gives {list(layers)}; got {content[LAYERS]!r:.60}; remove it"
        )
    return text


def layout_text(layout: Sequence[int], predictions: int = 0) -> str:
    """Write layers per stage as Megatron's ``--pipeline-model-parallel-layout``: ``(1, 3, 3, 0)`` is ``Et|(t*3|)*2L``.

    ``stage_layers`` reads what this writes.

    Args:
        predictions: the layers of multi-token prediction that the last one of the layout stands for.
    """
    layers, at = without_predictions(layout) if predictions else (tuple(layout), -1)
    last = len(layout) - 1
    return write_layout(
        [
            "E" * (stage == 0) + "t" * count + "m" * (predictions * (stage == at)) + "L" * (stage == last)
            for stage, count in enumerate(layers)
        ]
    )


def without_predictions(layout: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The layers per stage of a layout whose last part is multi-token prediction, and its stage."""
    at = max(stage for stage, count in enumerate(layout) if count)
    return tuple(count - (stage == at) for stage, count in enumerate(layout)), at


def stages_text(layout: Sequence[int]) -> str:
    """Write layers per stage for people: ``1, 3 x2, 0``."""
    runs = ((count, len(list(same))) for count, same in groupby(layout))
    return ", ".join(str(count) if times == 1 else f"{count} x{times}" for count, times in runs)


def stage_layers(
    placement: Placement,
    num_layers: int,
    layout: str | None = None,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding: bool = False,
    loss: bool = False,
) -> tuple[int, ...]:
    """The number of transformer layers per stage, in model order, as megatron-core divides them.

    Args:
        layout: ``--pipeline-model-parallel-layout``, which defines the layers of every stage.
        first: layers of the first pipeline rank, if the job sets them.
        last: layers of the last pipeline rank, if the job sets them.
        embedding: whether the embedding counts as a layer.
        loss: whether the loss counts as a layer.

    Raises:
        UserError: the number of stages or layers in ``layout`` differs from the job's.
    """
    num_stages, p = placement.num_stages, placement.num_ranks
    if layout is not None:
        return layers_of(layout, num_stages, num_layers)
    given = {rank: count for rank, count in {0: first, p - 1: last}.items() if count is not None}
    left = num_layers + embedding + loss - sum(given.values())
    # Megatron divides layers as if stages were interleaved: stage s is on rank s % p.
    by_rank = [given[rank] if rank in given else left // (p - len(given)) for rank in range(p)]
    each = [by_rank[stage % p] // (num_stages // p) for stage in range(num_stages)]
    each[0] -= embedding
    each[-1] -= loss
    return tuple(each)


def check_ends(first: int | None, last: int | None, num_chunks: int) -> None:
    """Reject layers of the first or last pipeline rank that do not divide evenly over the stages of that rank.

    Raises:
        UserError: the flag, the values and the remedy.
    """
    for which, count in (("first", first), ("last", last)):
        if count is not None and count % num_chunks:
            raise UserError(
                f"--decoder-{which}-pipeline-num-layers must be divisible by the number of stages per rank, got "
                f"{count} layers and {num_chunks} stages; change it, give --pipeline-model-parallel-layout instead, or "
                "take a schedule with one stage per rank"
            )


def job_layers(args: Any) -> tuple[int, ...]:
    """Return the number of layers per stage, from checked ``args``.

    Raises:
        UserError: as ``stage_layers``.
    """
    return stage_layers(
        args.placement,
        args.num_layers,
        args.pipeline_model_parallel_layout,
        first=args.num_layers_in_first_pipeline_stage,
        last=args.num_layers_in_last_pipeline_stage,
        embedding=args.account_for_embedding_in_pipeline_split,
        loss=args.account_for_loss_in_pipeline_split,
    )


def job_predictions(args: Any) -> tuple[int, ...]:
    """Return the layers of multi-token prediction per stage, from checked ``args``; by default the last has all."""
    return _predictions(args, args.placement.num_stages)


def embedding_stages(args: Any, num_stages: int) -> tuple[int, ...]:
    """Return the stages that have a copy of the embedding, from a job's flags."""
    return stages_with_embedding(_predictions(args, num_stages), not args.untie_embeddings_and_output_weights)


def stages_with_embedding(predictions: Sequence[int], tied: bool) -> tuple[int, ...]:
    """Return the stages that have a copy of the embedding, whose gradients are added.

    They are the first, the last if the output layer is tied, and the one with multi-token prediction.

    Args:
        predictions: layers of multi-token prediction per stage.
    """
    predicts = [stage for stage, count in enumerate(predictions) if count]
    return tuple(sorted({0, *((len(predictions) - 1,) if tied else ()), *predicts}))


def _predictions(args: Any, num_stages: int) -> tuple[int, ...]:
    if (layout := getattr(args, LAYOUT, None)) is not None:
        return predictions_of(layout)
    return (*(0,) * (num_stages - 1), getattr(args, "mtp_num_layers", None) or 0)

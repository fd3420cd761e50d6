"""Check that the model chunks of all ranks are the stages of a plan: their number, their ends and their layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.runtime.groups import torchs
from megatron.zero_bubble.integration.adapter.stage import StageFacts

_REMEDY = (
    "build the chunks with megatron.zero_bubble.build_stages(make_chunk), as examples/own_loop.py does, or, in a "
    "framework that builds them itself, take a schedule with Megatron's placement, such as zb-h1 (docs/frameworks.md "
    "says which frameworks can build others)"
)


class Layers(NamedTuple):
    """The layers of the decoder in one stage, by Megatron's numbers.

    Attributes:
        ends: the first and the last number; empty for a stage without layers, None if the layers have no numbers.
    """

    stage: int
    ends: tuple[int, ...] | None


def check_chunks(
    group: dist.ProcessGroup, schedule: str, stages: Sequence[StageFacts], chunks: Sequence[torch.nn.Module]
) -> None:
    """Check the chunks of every rank of ``group``. A collective call.

    Args:
        schedule: its name, for messages.
        stages: those of this rank.
        chunks: the model of this rank, a chunk for each of ``stages``.

    Raises:
        UserError: on all ranks, if one of them has another number of chunks, the embedding or the output layer in
            another stage than the first or the last, or layers that do not follow those of the stage before.
    """
    error = next(_problems(group.rank(), schedule, stages, chunks), None)
    problem = None if error is None else str(error)
    own = [] if problem else [Layers(facts.stage, _ends(each)) for facts, each in zip(stages, chunks, strict=True)]
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, (problem, own), group=torchs(group))
    problem = next((each for each, _ in of_ranks if each), None)
    if problem is not None:
        raise UserError(problem)
    error = wrong_order(schedule, sorted(layers for _, found in of_ranks for layers in found))
    if error is not None:
        raise error


def wrong_order(schedule: str, layers: Sequence[Layers]) -> UserError | None:
    """The refusal of stages, in order, whose layers do not follow each other; None if they do.

    Layers without numbers are not compared, nor are those of a model that numbers the layers of each stage from one.
    """
    if any(each.ends is None for each in layers):
        return None
    numbered = [(each.stage, *each.ends) for each in layers if each.ends]
    if len({first for _, first, _ in numbered}) == 1:
        return None
    for (before, _, last), (stage, first, _) in pairwise(numbered):
        if first != last + 1:
            return UserError(
                f"the layers of schedule {schedule!r} must follow each other along its stages: stage {stage} must "
                f"begin with layer {last + 1}, after layer {last} of stage {before}; got layer {first}; {_REMEDY}"
            )
    return None


def _problems(
    rank: int, schedule: str, stages: Sequence[StageFacts], chunks: Sequence[torch.nn.Module]
) -> Iterator[UserError]:
    """What is wrong with the chunks of one rank, apart from their layers."""
    if len(chunks) != len(stages):
        yield UserError(
            f"schedule {schedule!r} has {len(stages)} stages on this rank, so the model must have {len(stages)} "
            f"chunks; got {len(chunks)}; {_REMEDY}"
        )
        return
    for facts, chunk in zip(stages, chunks, strict=True):
        model = _model(chunk)
        if (model.pre_process, model.post_process) != (facts.stage == 0, facts.is_last):
            yield UserError(
                f"stage {facts.stage} of schedule {schedule!r} has the wrong model chunk: embedding "
                f"{model.pre_process}, output layer {model.post_process}; {_REMEDY}"
            )
        taken_for = rank if facts.megatron_rank is None else facts.megatron_rank
        if _rank_of_casts(chunk) not in (None, taken_for):
            yield UserError(
                f"stage {facts.stage} of schedule {schedule!r} must be wrapped as on pipeline rank {taken_for}, which "
                f"decides whether its output is cast to float32; got a Float16Module of rank {_rank_of_casts(chunk)}; "
                f"{_REMEDY}"
            )


def _rank_of_casts(chunk: Any) -> int | None:
    """The pipeline rank that decides whether the output is cast to float32; None if none does by a group of its own."""
    while chunk is not None and not isinstance(chunk, Float16Module):
        chunk = getattr(chunk, "module", None)
    group = getattr(getattr(chunk, "pg_collection", None), "pp", None)
    return None if group is None else int(group.rank())


def _model(chunk: torch.nn.Module) -> Any:
    return get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)


def _ends(chunk: torch.nn.Module) -> tuple[int, ...] | None:
    """See ``Layers``; of the language model in a model of several modalities."""
    model = _model(chunk)
    model = getattr(model, "language_model", model)
    decoder = getattr(model, "decoder", None) or getattr(model, "encoder", None)
    layers = getattr(decoder, "layers", None)
    if layers is None or not all(hasattr(layer, "layer_number") for layer in layers):
        return None
    numbers = [int(layer.layer_number) for layer in layers]
    return (numbers[0], numbers[-1]) if numbers else ()

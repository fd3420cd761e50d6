"""The layers of every stage of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.ir import Placement


def gather_layers(
    chunks: Sequence[torch.nn.Module], placement: Placement, group: dist.ProcessGroup
) -> tuple[int, ...] | tuple[str, ...]:
    """The number of layers of every stage, or their letters in a hybrid model; empty for a model whose layers are not
    in ``decoder.layers``.

    A collective call.

    Args:
        chunks: the model chunks of this rank, with their wrappers.
    """
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, [_layers(chunk) for chunk in chunks], group=group)
    per_stage = {
        stage: count
        for rank, counts in enumerate(of_ranks)
        for stage, count in zip(placement.stages_of(rank), counts, strict=False)
        if count is not None
    }
    return tuple(per_stage[s] for s in sorted(per_stage)) if len(per_stage) == placement.num_stages else ()


def _layers(chunk: torch.nn.Module) -> int | str | None:
    model: Any = chunk
    while hasattr(model, "module"):  # DDP, and the wrapper of 16-bit models
        model = model.module
    decoder = getattr(model, "decoder", None)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        return None
    letters = getattr(decoder, "layer_type_list", None)
    return len(layers) if letters is None else "".join(letters)

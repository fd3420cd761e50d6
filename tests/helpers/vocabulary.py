"""Compare training whose vocabulary is divided over the pipeline with stock megatron-core on the same ranks.

Sums over the vocabulary are rounded in another order, so results are equal up to tolerances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.helpers.parity import _under_each
from tests.helpers.slices import Difference, Gradients, own_gradients_of

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def whole_gradients_of(args: Any, start: dict[str, torch.Tensor] | None) -> tuple[Gradients, dict[str, torch.Tensor]]:
    """Run the passes of one iteration, and gather the gradients of the pipeline: of the vocabulary layers, whole.

    The gradient of a tied output layer is that of the embedding, and is left out.
    """
    from megatron.core import parallel_state

    from megatron.zero_bubble.job.flags import vocabulary_algorithm

    own, start = own_gradients_of(args, start)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    tensor = parallel_state.get_tensor_model_parallel_group()
    of_stages: list[Any] = [None] * pipeline.size()
    torch.distributed.all_gather_object(of_stages, own.of, group=pipeline)
    of_ranks: list[Any] = [None] * tensor.size()
    torch.distributed.all_gather_object(of_ranks, of_stages, group=tensor)
    merged = {name: gradient for of_stage in of_stages for name, gradient in of_stage.items()}
    merged.pop(OUTPUT, None)
    for name in (EMBEDDING, OUTPUT) if args.untie_embeddings_and_output_weights else (EMBEDDING,):
        shards = [
            stages[stage][name] for stage in range(pipeline.size()) for stages in of_ranks if name in stages[stage]
        ]
        if (
            name == EMBEDDING and vocabulary_algorithm(args) is None
        ):  # stock's tied output layer has no shard of its own
            shards = shards[: tensor.size()]
        merged[name] = torch.cat(shards)
    return Gradients(own.losses, merged), start


def differences(rank: int, flags: str, schedules: Sequence[str]) -> list[Difference]:
    """Return how far the gradients of each schedule are from those of stock; call it on a rank pool."""
    found: list[Gradients] = []
    start = None
    for args, _ in _under_each(flags, [None, *schedules]):
        gradients, start = whole_gradients_of(args, start)
        size = len(found[0].of[EMBEDDING]) if found else 0
        for name in (EMBEDDING, OUTPUT) if found else ():
            if name in gradients.of:  # without the padding
                assert not gradients.of[name][size:].any()
                gradients.of[name] = gradients.of[name][:size]
        found.append(gradients)
    return [Difference.between(gradients, found[0]) for gradients in found[1:]]

"""Compare training whose vocabulary is divided over the pipeline with stock megatron-core on the same ranks.

Sums over the vocabulary are rounded in another order, so results are equal up to tolerances.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from tests.helpers.parity import Outcome, Tokens, _splits, _train_once, _under_each
from tests.helpers.slices import Difference, Gradients, Prepare, own_gradients_of

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def whole_gradients_of(
    args: Any, start: dict[str, torch.Tensor] | None, prepare: Prepare = lambda _: None
) -> tuple[Gradients, dict[str, torch.Tensor]]:
    """Run the passes of one iteration, and gather the gradients of the pipeline: of the vocabulary layers, whole.

    The gradient of a tied output layer is that of the embedding, and is left out. ``prepare`` is called with the model
    chunks before the passes.
    """
    from megatron.core import parallel_state

    divided = args.source is not None and args.source.setup.vocabulary is not None
    own, start = own_gradients_of(args, start, prepare)
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
        if name == EMBEDDING and not divided:  # stock's tied output layer has no shard of its own
            shards = shards[: tensor.size()]
        merged[name] = torch.cat(shards)
    return Gradients(own.losses, merged), start


def differences(rank: int, flags: str, schedules: Sequence[str]) -> list[Difference]:
    """Return how far the gradients of each schedule are from those of stock; call it on a rank pool."""
    found: list[Gradients] = []
    start = None
    for args, _ in _under_each(flags, [None, *schedules]):
        gradients, start = whole_gradients_of(args, start)
        found.append(gradients)
    return [Difference.between(_without_padding(gradients, found[0]), found[0]) for gradients in found[1:]]


def differences_on_context_ranks(rank: int, flags: str, schedules: Sequence[str]) -> list[Difference]:
    """As ``differences``; the replicas have halves of the same sequences, as with context parallelism.

    Their attention, megatron-core's own, sees the tokens of its rank only: no other runs without TransformerEngine.
    """
    from megatron.core import parallel_state

    initialize, whole = parallel_state.initialize_model_parallel, Tokens.__getitem__

    def half(samples: Tokens, index: int) -> dict[str, torch.Tensor]:
        context = parallel_state.get_context_parallel_rank()
        cut = {name: tensor.chunk(2)[context] for name, tensor in whole(samples, index).items()}
        cut["loss_mask"][-1] = 1.0  # no half without a loss
        return cut

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "initialize_model_parallel", partial(initialize, context_parallel_size=2))
        patch.setattr(Tokens, "__getitem__", half)
        return differences(rank, flags, schedules)


def distances_in_bf16(rank: int, flags: str, schedules: Sequence[str]) -> list[Difference]:
    """Return how far gradients in bfloat16 are from stock's in float32: stock's own, then those of each schedule."""
    start = None
    for _ in range(2):  # the reference has weights that bfloat16 represents exactly
        for args, _pipeline in _under_each(flags, [None]):
            exact, start = whole_gradients_of(args, start)
            start = {name: weight.bfloat16().float() for name, weight in start.items()}
    found = []
    for args, _pipeline in _under_each(f"{flags} --bf16", [None, *schedules]):
        found.append(whole_gradients_of(args, start)[0])
    return [Difference.between(_without_padding(gradients, exact), exact) for gradients in found]


def train_with_rounded_weights(rank: int, flags: str, num_draws: int) -> list[Outcome]:
    """Train with stock, then again ``num_draws`` times after half of all initial weights, drawn at random, were moved
    to the next float32 number above or below; call it on a rank pool.

    How far these runs are from the first one is how far rounding alone leads.
    """
    start: dict[str, torch.Tensor] | None = None
    outcomes = []
    for draw, (args, _pipeline) in enumerate(_under_each(flags, [None] * (1 + num_draws))):
        rounded = None if start is None else _rounded(start, draw)
        outcome, first = _train_once(args, _splits(args), rounded)
        start = first if start is None else start
        outcomes.append(outcome)
    return outcomes


def _rounded(weights: dict[str, torch.Tensor], draw: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(draw)
    moved = {}
    for name, weight in weights.items():
        drawn = torch.rand(weight.shape, generator=generator)
        up, down = (torch.nextafter(weight, weight + sign) for sign in (1, -1))
        moved[name] = weight.where(drawn > 0.5, up.where(drawn > 0.25, down))
    return moved


def _without_padding(gradients: Gradients, stock: Gradients) -> Gradients:
    """Remove the rows of the vocabulary that stock does not have; their gradient is zero."""
    whole = {name: gradients.of[name] for name in (EMBEDDING, OUTPUT) if name in gradients.of}
    size = len(stock.of[EMBEDDING])
    assert not any(gradient[size:].any() for gradient in whole.values())
    return Gradients(gradients.losses, gradients.of | {name: gradient[:size] for name, gradient in whole.items()})


def largest_differences(found: Outcome, stock: Outcome) -> tuple[float, float]:
    """The largest relative differences of a loss and of a gradient norm."""
    return _largest(found.losses, stock.losses), _largest(found.grad_norms, stock.grad_norms)


def _largest(found: Sequence[str], reference: Sequence[str]) -> float:
    """The largest relative difference of hexadecimal numbers, which may follow words."""
    assert len(found) == len(reference)
    pairs = [(own.split()[-1], other.split()[-1]) for own, other in zip(found, reference, strict=True)]
    numbers = [(float.fromhex(own), float.fromhex(other)) for own, other in pairs if "None" not in (own, other)]
    assert all(own == other for own, other in pairs if "None" in (own, other))
    return max((abs(own - other) / abs(other) for own, other in numbers), default=0.0)

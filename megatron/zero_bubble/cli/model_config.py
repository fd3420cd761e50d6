"""Read the shapes of a model from a training configuration (configs/), for a cost estimate."""

from __future__ import annotations

import argparse

from megatron.zero_bubble.costs.estimate import Model
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement
from megatron.zero_bubble.ir.sizes import MOST_LAYERS, check_size
from megatron.zero_bubble.job.model import VOCABULARY, model_of
from megatron.zero_bubble.search.cut import even


def read_model(
    file: str, num_ranks: int | None, flash: bool, any_layers: bool = False, num_microbatches: int | None = None
) -> tuple[Model, int, tuple[str, ...]]:
    """Read a model: its shapes, the number of microbatches per iteration, and the assumptions made, as sentences.

    ``num_ranks`` and ``num_microbatches`` override the sizes of ``file``. With ``any_layers``, the layers per rank that
    ``file`` gives are ignored, and the layers need not divide evenly.

    Raises:
        UserError: when the file cannot be read, lacks a shape, or describes a model that the estimate does not cover.
    """
    # The training parser reads the file, so that configurations have one reader; it does not import torch.
    from megatron.zero_bubble.training.arguments import parse

    args = parse(["--config", file])
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"):
        if getattr(args, name) is None:
            raise UserError(f"an estimate needs --{name.replace('_', '-')}; {file} does not set it; add it to the file")
        if getattr(args, name) < 1:
            raise UserError(
                f"--{name.replace('_', '-')} must be 1 or more; got {getattr(args, name)} in {file}; raise it"
            )
    if args.num_layers > MOST_LAYERS:
        raise UserError(f"--num-layers must be at most {MOST_LAYERS:,}; got {args.num_layers:,} in {file}; lower it")
    if args.num_moe_experts is not None:
        raise UserError(
            f"an estimate covers only dense models; {file} has experts; record the costs of a run and use --costs"
        )
    p = args.pipeline_model_parallel_size if num_ranks is None else num_ranks
    if p < 1:
        raise UserError(f"--pipeline-model-parallel-size must be 1 or more; got {p} in {file}; raise it")
    batch = args.global_batch_size or args.micro_batch_size
    count = max(1, batch // args.micro_batch_size)
    check_size(p, count if num_microbatches is None else num_microbatches)
    layers = even(Placement.linear(p), args.num_layers) if any_layers else _layers(args, p, file)
    model = model_of(args, layers, flash)
    assumed = [] if args.vocab_size else [f"A vocabulary of {VOCABULARY:,} is assumed."]
    if args.global_batch_size:
        assumed.append(
            f"One data-parallel rank is assumed to run the global batch of {batch}; --num-microbatches overrides this."
        )
    return model, count, tuple(assumed)


def _layers(args: argparse.Namespace, num_ranks: int, file: str) -> tuple[int, ...]:
    """Return the layers per rank: the first and last as given, the others divided evenly."""
    first, last = args.num_layers_in_first_pipeline_stage, args.num_layers_in_last_pipeline_stage
    if num_ranks == 1:
        return (args.num_layers,)
    given = [count for count in (first, last) if count is not None]
    left, ranks = args.num_layers - sum(given), num_ranks - len(given)
    if left < 0 or (left % ranks if ranks else left):
        raise UserError(
            f"layers must divide evenly among the ranks without a given number; {file} leaves {left} layers to {ranks} "
            "ranks; set decoder-first-pipeline-num-layers and decoder-last-pipeline-num-layers, or --num-ranks"
        )
    each = left // ranks if ranks else 0
    middle = (each,) * ranks
    return (*(() if first is None else (first,)), *middle, *(() if last is None else (last,)))

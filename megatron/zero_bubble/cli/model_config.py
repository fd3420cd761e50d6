"""Read the shapes of a model from a training configuration (configs/), for a cost estimate."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.errors import UserError, as_flag
from megatron.zero_bubble.core.formats.facts import Facts
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.ir.sizes import MOST_LAYERS, check_size
from megatron.zero_bubble.planning.division import Division
from megatron.zero_bubble.planning.job.facts import facts_of
from megatron.zero_bubble.planning.job.model import (
    GPT2_VOCAB_SIZE,
    division_of,
    model_of,
    predicted_layers,
    stated_vocab_size,
    unestimated_kinds,
)
from megatron.zero_bubble.planning.job.pattern import pattern_of


class ReadModel(NamedTuple):
    """A model of a file.

    Attributes:
        model: its shapes, with one stage per rank.
        num_microbatches: those of an iteration.
        assumed: the assumptions made, as sentences.
        division: how its layers are divided among the stages of other placements.
        predictions: the letters of each layer of multi-token prediction.
    """

    model: Model
    num_microbatches: int
    assumed: tuple[str, ...]
    division: Division
    facts: Facts
    predictions: tuple[str, ...]


def read_model(
    file: str, num_ranks: int | None, flash: bool, any_layers: bool = False, num_microbatches: int | None = None
) -> ReadModel:
    """Read a model.

    ``num_ranks`` and ``num_microbatches`` override the sizes of ``file``. With ``any_layers``, the layers per rank that
    ``file`` gives are ignored, and the layers need not divide evenly.

    Raises:
        UserError: when the file cannot be read, lacks a shape, or describes a model that the estimate does not cover.
    """
    # The parser of a job's flags reads the file, so that configurations have one reader; it does not import torch.
    from megatron.zero_bubble.planning.job.arguments.checks import check_expert_numbers
    from megatron.zero_bubble.planning.job.arguments.parser import parse

    args = parse(["--config", file], of_megatron=True)
    if (pattern := pattern_of(args)) is not None:
        args.num_layers = len(pattern.layers)
    if others := unestimated_kinds(args):
        raise UserError(
            f"an estimate needs kinds of layers whose costs are known; got {', '.join(others)} in {file}; give --costs"
        )
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"):
        if getattr(args, name) is None:
            raise UserError(f"an estimate needs {as_flag(name)}; {file} does not set it; add it to the file")
        if getattr(args, name) < 1:
            raise UserError(f"{as_flag(name)} must be 1 or more; got {getattr(args, name)} in {file}; raise it")
    if args.num_layers > MOST_LAYERS:
        raise UserError(f"--num-layers must be at most {MOST_LAYERS:,}; got {args.num_layers:,} in {file}; lower it")
    if args.expert_model_parallel_size < 1:
        raise UserError(
            f"--expert-model-parallel-size must be 1 or more; got {args.expert_model_parallel_size} in {file}; raise it"
        )
    check_expert_numbers(args)
    p = args.pipeline_model_parallel_size if num_ranks is None else num_ranks
    if p < 1:
        raise UserError(f"--pipeline-model-parallel-size must be 1 or more; got {p} in {file}; raise it")
    batch = args.global_batch_size or args.micro_batch_size
    count = max(1, batch // args.micro_batch_size)
    check_size(p, count if num_microbatches is None else num_microbatches)
    if not any_layers:
        _check_divided(args, p, file)
    division = division_of(args, stated_vocab_size(args))
    if any_layers:
        division = Division(args.num_layers, predictions=division.predictions)
    model = model_of(args, division.on(Placement.linear(p)), flash)
    assumed = [] if args.vocab_size else [f"A vocabulary of {GPT2_VOCAB_SIZE:,} is assumed."]
    if args.global_batch_size:
        assumed.append(
            f"One data-parallel rank is assumed to run the global batch of {batch}; --num-microbatches overrides this."
        )
    return ReadModel(model, count, tuple(assumed), division, facts_of(args), predicted_layers(args))


def _check_divided(args: argparse.Namespace, num_ranks: int, file: str) -> None:
    """Check that the layers that are not on the first or last rank by their flags divide evenly among the others."""
    if num_ranks == 1 or args.pipeline_model_parallel_layout is not None:
        return
    first, last = args.num_layers_in_first_pipeline_stage, args.num_layers_in_last_pipeline_stage
    given = [count for count in (first, last) if count is not None]
    counted = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    left, ranks = args.num_layers + counted - sum(given), num_ranks - len(given)
    if left < 0 or (left % ranks if ranks else left):
        raise UserError(
            f"layers must divide evenly among the ranks without a given number; {file} leaves {left} layers to {ranks} "
            "ranks; set decoder-first-pipeline-num-layers and decoder-last-pipeline-num-layers, or --num-ranks"
        )

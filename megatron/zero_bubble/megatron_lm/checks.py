"""Whether a Megatron-LM job and a zero-bubble schedule fit each other, read off the job's flags."""

from __future__ import annotations

import argparse
from typing import Any

import megatron.core
from megatron.core.transformer import pipeline_parallel_layer_layout

from megatron.zero_bubble.adapter.placement import is_megatrons_own
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement
from megatron.zero_bubble.job.config import ZeroBubbleConfig
from megatron.zero_bubble.job.layers import balanced_layout
from megatron.zero_bubble.job.rules import Job, check_flags, check_options, check_schedule, place_stages
from megatron.zero_bubble.job.source import ScheduleSource
from megatron.zero_bubble.megatron_lm.batches import num_microbatches
from megatron.zero_bubble.patching.seams import installed_seams


def configure(args: Any, options: argparse.Namespace) -> tuple[ZeroBubbleConfig, ScheduleSource]:
    """What the job's flags, not validated yet, make of ours; the job learns how many stages a rank has.

    Raises:
        UserError: flags that exclude each other, no pipeline, or stages that the schedule does not have.
    """
    _check_hybrid(args)
    check_flags(Job(options, under_launcher=True))
    ranks, asked = args.pipeline_model_parallel_size, _chunks_of_job(args)
    config, source = place_stages(options, args, asked, peer_timeout_s=60.0 * args.distributed_timeout_minutes)
    placement = source.placement
    if placement.stage_to_rank[:ranks] != tuple(range(ranks)):
        raise UserError(
            f"Megatron-LM needs stages 0 to {ranks - 1} on ranks 0 to {ranks - 1}, in this order; the schedule has "
            f"them on ranks {list(placement.stage_to_rank[:ranks])}; choose another"
        )
    chunks = placement.num_stages // ranks
    if chunks > 1 and asked is None:
        _ask_for(chunks, placement, args)
    return config, source


def check(args: Any, options: argparse.Namespace, source: ScheduleSource) -> None:
    """Refuse what the job's validated flags ask for and the schedule cannot honour.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    placement = source.placement
    own = is_megatrons_own(placement)
    check_options(args, in_place=own)
    check_schedule(options, source, args.pipeline_model_parallel_size, num_microbatches(args))
    _check_weight_shards(args)
    ends_meet = placement.stage_to_rank[0] == placement.stage_to_rank[-1]
    tied = not args.untie_embeddings_and_output_weights
    if ends_meet and tied and args.load and not installed_seams().loads_both_ends:
        raise UserError(
            f"megatron-core {megatron.core.__version__} cannot load a checkpoint where one rank holds both ends of a "
            "tied embedding, as under this schedule; take Megatron-LM core_r0.15 or newer, a schedule with one stage a "
            "rank, or --untie-embeddings-and-output-weights"
        )
    if not own and (args.save or args.load) and args.ckpt_format == "torch":
        raise UserError(
            "checkpoints of --ckpt-format torch are files of ranks, and this schedule has its stages on other ranks; "
            "give --ckpt-format torch_dist"
        )


def _check_weight_shards(args: Any) -> None:
    """From core_r0.19 on every job says how many; one a tensor-parallel rank is tensor parallelism and no more."""
    for expert in ("", "expert_"):
        flag = f"{expert}tensor_parallel_num_weight_shards"
        ranks = args.expert_tensor_parallel_size if expert else args.tensor_model_parallel_size
        shards = getattr(args, flag, ranks)
        if shards != ranks:
            raise UserError(
                f"zero-bubble schedules need --{flag.replace('_', '-')} to be {ranks}, one for each of the "
                f"{expert.replace('_', ' ')}tensor-parallel ranks, because the gradients of weights in more shards are "
                f"reduced where they are computed; got {shards}; drop it"
            )


def _chunks_of_job(args: Any) -> int | None:
    """Stages a rank, where the job says how many."""
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return int(args.num_virtual_stages_per_pipeline_rank)
    ranks = args.pipeline_model_parallel_size
    if getattr(args, "pipeline_model_parallel_layout", None) is not None:
        layout = pipeline_parallel_layer_layout.PipelineParallelLayerLayout
        return int(layout.get_num_stages_from_str(args.pipeline_model_parallel_layout)) // ranks
    if args.num_layers_per_virtual_pipeline_stage is not None:
        return _counted_layers(args) // ranks // int(args.num_layers_per_virtual_pipeline_stage)
    return None


def _check_hybrid(args: Any) -> None:
    pattern = getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None)
    if pattern is not None:
        raise UserError(
            f"zero-bubble schedules need --num-layers, which a hybrid layer pattern replaces; got {pattern!r}; train "
            "models of other than transformer layers without a schedule"
        )


def _ask_for(chunks: int, placement: Placement, args: Any) -> None:
    """Have Megatron put ``chunks`` stages on a rank, of equal size or else about equal work."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if first is not None or last is not None or _counted_layers(args) % placement.num_stages == 0:
        args.num_virtual_stages_per_pipeline_rank = chunks
        return
    if args.mtp_num_layers:
        raise UserError(
            f"--num-layers must be divisible by the {placement.num_stages} stages where there is multi-token "
            f"prediction, got {args.num_layers}; change it, or give --pipeline-model-parallel-layout"
        )
    args.pipeline_model_parallel_layout = balanced_layout(placement, args.num_layers)
    # The layout counts them already, and Megatron takes the one or the other.
    args.account_for_embedding_in_pipeline_split = args.account_for_loss_in_pipeline_split = False


def _counted_layers(args: Any) -> int:
    if args.num_layers is None:
        raise UserError("zero-bubble schedules need --num-layers, got none; only models of one stack of layers have it")
    embedding, loss = args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split
    return int(args.num_layers) + bool(embedding) + bool(loss)

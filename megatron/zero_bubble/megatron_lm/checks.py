"""Check from the flags of a Megatron-LM job that the job and its zero-bubble schedule fit each other."""

from __future__ import annotations

import argparse
import os
from typing import Any

import megatron.core
from megatron.core.transformer import pipeline_parallel_layer_layout

from megatron.zero_bubble.adapter.placement import is_megatrons_own
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement
from megatron.zero_bubble.job.config import ZeroBubbleConfig
from megatron.zero_bubble.job.host_memory import check_host_memory
from megatron.zero_bubble.job.model import stated_vocabulary, uneven_layout
from megatron.zero_bubble.job.options import check_options
from megatron.zero_bubble.job.rules import Job, check_flags, check_schedule
from megatron.zero_bubble.job.shards import check_shards
from megatron.zero_bubble.job.source import ScheduleSource
from megatron.zero_bubble.job.stages import place_stages
from megatron.zero_bubble.megatron_lm.batches import in_training, num_microbatches
from megatron.zero_bubble.patching.seams import installed_seams


def configure(args: Any, options: argparse.Namespace) -> tuple[ZeroBubbleConfig, ScheduleSource]:
    """Build our configuration before Megatron validates the job's flags, and set the job's number of stages per rank.

    Raises:
        UserError: mutually exclusive flags, no pipeline, or a number of stages that the schedule does not have.
    """
    _check_hybrid(args)
    check_flags(Job(options, under_launcher=True))
    ranks, asked = args.pipeline_model_parallel_size, _chunks_of_job(args)
    config, source = place_stages(options, args, asked, peer_timeout_s=60.0 * args.distributed_timeout_minutes)
    placement = source.placement
    if placement.stage_to_rank[:ranks] != tuple(range(ranks)):
        raise UserError(
            f"Megatron-LM needs stages 0 to {ranks - 1} on ranks 0 to {ranks - 1}, in this order; the schedule has "
            f"them on ranks {list(placement.stage_to_rank[:ranks])}; choose another schedule"
        )
    chunks = placement.num_stages // ranks
    if asked is None:
        _ask_for(chunks, placement, args)
    return config, source


def check(args: Any, options: argparse.Namespace, source: ScheduleSource) -> None:
    """Reject options of the job, whose flags are now validated, that the schedule does not support.

    Raises:
        UserError: an unsupported option; the message has the rule, the value and the remedy.
    """
    placement = source.placement
    own = is_megatrons_own(placement)
    check_options(args, own, bool(options.zero_bubble_post_validation))
    check_schedule(options, source, args.pipeline_model_parallel_size, num_microbatches(args), args)
    _check_weight_shards(args)
    if options.zero_bubble_shard_weights:
        check_shards(args)
    ends_meet = placement.stage_to_rank[0] == placement.stage_to_rank[-1]
    tied = not args.untie_embeddings_and_output_weights
    if ends_meet and tied and args.load and not installed_seams().loads_both_ends:
        raise UserError(
            f"megatron-core {megatron.core.__version__} cannot load a checkpoint if one rank holds both ends of a tied "
            "embedding, as under this schedule; use Megatron-LM core_r0.15 or newer, a schedule with one stage per "
            "rank, or --untie-embeddings-and-output-weights"
        )
    if not own and (args.save or args.load) and args.ckpt_format == "torch":
        raise UserError(
            "--ckpt-format torch stores checkpoints by rank, and this schedule has its stages on other ranks than "
            "Megatron's schedules; use --ckpt-format torch_dist"
        )


def check_offload(args: Any, config: ZeroBubbleConfig, source: ScheduleSource) -> None:
    """Check the limit of host memory, if there is one, against an estimate for equally many layers per stage.

    Raises:
        UserError: a rank needs more.
    """
    select = config.selection(source)
    if config.host_memory is None or select is None:
        return
    layers = (args.num_layers // source.placement.num_stages,) * source.placement.num_stages
    schedule = source.make(max(in_training(args)))
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    check_host_memory(args, layers, config.host_memory, schedule, select, node_size)


def _check_weight_shards(args: Any) -> None:
    """Reject more weight shards than tensor-parallel ranks; every job of core_r0.19 or newer sets their number."""
    for expert in ("", "expert_"):
        flag = f"{expert}tensor_parallel_num_weight_shards"
        ranks = args.expert_tensor_parallel_size if expert else args.tensor_model_parallel_size
        shards = getattr(args, flag, ranks)
        if shards != ranks:
            raise UserError(
                f"zero-bubble schedules need --{flag.replace('_', '-')} to be {ranks}, one per "
                f"{expert.replace('_', ' ')}tensor-parallel rank, because the gradients of weights in more shards are "
                f"reduced where they are computed; got {shards}; drop the flag"
            )


def _chunks_of_job(args: Any) -> int | None:
    """Stages per rank that the job's flags set; None if they set none."""
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
            "hybrid models without a zero-bubble schedule"
        )


def _ask_for(chunks: int, placement: Placement, args: Any) -> None:
    """Set the job's flags to ``chunks`` stages per rank: of equal size, or else balanced by their work.

    With one stage per rank, whatever this does not know is left to Megatron.
    """
    if chunks == 1 and (args.num_layers is None or args.mtp_num_layers):
        return
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if first is not None or last is not None or _counted_layers(args) % placement.num_stages == 0:
        if chunks > 1:
            args.num_virtual_stages_per_pipeline_rank = chunks
        return
    if args.mtp_num_layers:
        raise UserError(
            f"with multi-token prediction, --num-layers must be divisible by the number of stages, got "
            f"{args.num_layers} and {placement.num_stages}; change it, or give --pipeline-model-parallel-layout"
        )
    args.pipeline_model_parallel_layout = uneven_layout(args, placement, stated_vocabulary(args))
    # The layout already includes embedding and loss, and Megatron accepts either the layout or these flags.
    args.account_for_embedding_in_pipeline_split = args.account_for_loss_in_pipeline_split = False


def _counted_layers(args: Any) -> int:
    if args.num_layers is None:
        raise UserError("zero-bubble schedules need --num-layers, got none; train a model with one stack of layers")
    embedding, loss = args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split
    return int(args.num_layers) + bool(embedding) + bool(loss)

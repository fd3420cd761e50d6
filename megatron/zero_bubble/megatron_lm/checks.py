"""Whether a Megatron-LM job and a zero-bubble schedule fit each other, read off the job's flags."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import megatron.core
from megatron.core.transformer import pipeline_parallel_layer_layout

from megatron.zero_bubble.adapter.placement import is_megatrons_own
from megatron.zero_bubble.ir import Placement
from megatron.zero_bubble.job.config import JobError, ZeroBubbleConfig, check_model_config, check_placement
from megatron.zero_bubble.job.flags import config_of, records
from megatron.zero_bubble.job.layers import balanced_layout
from megatron.zero_bubble.job.rules import Job, check_flags, check_schedule
from megatron.zero_bubble.megatron_lm.batches import num_microbatches
from megatron.zero_bubble.megatron_lm.data import check_data
from megatron.zero_bubble.patching.seams import installed_seams

# flag, the one value that works, why
_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("use_legacy_models", False, "models that are not megatron-core's do not leave W to others"),
    ("use_custom_fsdp", False, "its gradients take a way of their own"),
    ("use_megatron_fsdp", False, "its gradients take a way of their own"),
    ("use_torch_fsdp2", False, "its gradients take a way of their own"),
    ("cpu_offloading_num_layers", 0, "it assumes Megatron's order of backwards"),
    ("overlap_param_gather_with_optimizer_step", False, "it assumes Megatron's order of chunks"),
)
# The same for placements that are not Megatron's own.
_REFUSED_ELSEWHERE: tuple[tuple[str, Any, str], ...] = (
    ("mtp_num_layers", None, "Megatron has multi-token prediction on the last rank"),
    ("init_model_with_meta_device", False, "a tied embedding is copied when the model is built"),
    ("logits_save_dir", None, "Megatron looks for the output layer on the last rank"),
    ("logits_load_dir", None, "Megatron looks for the output layer on the last rank"),
)


def configure(args: Any, options: argparse.Namespace) -> tuple[ZeroBubbleConfig, Placement]:
    """What the job's flags, not validated yet, make of ours; the job learns how many stages a rank has.

    Raises:
        JobError: no pipeline, or stages that the schedule does not have.
        ValueError: of our flags.
    """
    ranks = args.pipeline_model_parallel_size
    if ranks < 2:
        raise JobError(
            "a zero-bubble schedule needs a pipeline of 2 or more ranks, got --pipeline-model-parallel-size "
            f"{ranks}; raise it or drop the schedule"
        )
    _check_hybrid(args)
    check_flags(Job(options, under_launcher=True))
    if not getattr(args, "overlap_p2p_comm", True):  # Megatron itself clears it where a rank has one stage
        raise JobError(
            "--no-overlap-p2p-communication is for Megatron's own interleaved schedule, got a zero-bubble schedule, "
            "whose messages always overlap its passes; drop one of the two"
        )
    asked = _chunks_of_job(args)
    config = config_of(options, measure_memory=records(options), peer_timeout_s=60.0 * args.distributed_timeout_minutes)
    if config.takes_chunks:
        config = replace(config, num_chunks=asked)
    placement = config.placement_on(ranks)
    check_placement(placement, ranks)
    chunks = placement.num_stages // ranks
    if placement.stage_to_rank[:ranks] != tuple(range(ranks)):
        raise JobError(
            "Megatron-LM has the first stages on ranks 0, 1 and so on, and asks the first of a rank's model chunks "
            f"where it is; the schedule has them on ranks {list(placement.stage_to_rank[:ranks])}; choose another"
        )
    if asked not in (None, chunks):
        raise JobError(
            f"the schedule has {chunks} stage{'s' * (chunks > 1)} a rank, the job {asked}; drop "
            "--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank or "
            "--pipeline-model-parallel-layout"
        )
    if chunks > 1 and asked is None:
        _ask_for(chunks, placement, args)
    return config, placement


def check(args: Any, options: argparse.Namespace, config: ZeroBubbleConfig, placement: Placement) -> None:
    """Refuse what the job's validated flags ask for and the schedule cannot honour.

    Raises:
        JobError: the rule, the value and the remedy.
        ValueError: the same, of what a model's configuration says too.
    """
    check_model_config(args)
    check_data(args)
    check_schedule(options, config, args.pipeline_model_parallel_size, num_microbatches(args))
    own = is_megatrons_own(placement)
    for flag, allowed, why in (*_REFUSED, *(() if own else _REFUSED_ELSEWHERE)):
        value = getattr(args, flag, allowed)
        if value not in (allowed, None):
            raise JobError(
                f"zero-bubble schedules{'' if own else ' of this placement'} need --{flag.replace('_', '-')} to be "
                f"{allowed or 'off'}, because {why}; got {value!r}; drop it"
            )
    _check_weight_shards(args)
    ends_meet = placement.stage_to_rank[0] == placement.stage_to_rank[-1]
    tied = not args.untie_embeddings_and_output_weights
    if ends_meet and tied and args.load and not installed_seams().loads_both_ends:
        raise JobError(
            f"megatron-core {megatron.core.__version__} cannot load a checkpoint where one rank holds both ends of a "
            "tied embedding, as under this schedule; take Megatron-LM core_r0.15 or newer, a schedule with one stage a "
            "rank, or --untie-embeddings-and-output-weights"
        )
    if not own and (args.save or args.load) and args.ckpt_format == "torch":
        raise JobError(
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
            raise JobError(
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
        raise JobError(
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
        raise JobError(
            f"--num-layers must be divisible by the {placement.num_stages} stages where there is multi-token "
            f"prediction, got {args.num_layers}; change it, or give --pipeline-model-parallel-layout"
        )
    args.pipeline_model_parallel_layout = balanced_layout(placement, args.num_layers)
    # The layout counts them already, and Megatron takes the one or the other.
    args.account_for_embedding_in_pipeline_split = args.account_for_loss_in_pipeline_split = False


def _counted_layers(args: Any) -> int:
    if args.num_layers is None:
        raise JobError("zero-bubble schedules need --num-layers, got none; only models of one stack of layers have it")
    embedding, loss = args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split
    return int(args.num_layers) + bool(embedding) + bool(loss)

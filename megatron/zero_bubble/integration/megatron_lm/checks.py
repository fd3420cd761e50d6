"""Check from the flags of a Megatron-LM job that the job and its zero-bubble schedule fit each other.

A run calls ``configure`` before Megatron validates the flags and ``check`` after that; the dry run calls both on the
flags as they are given. ``of_version.py`` has the rules that depend on the installed Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron.zero_bubble.core.errors import UserError, as_flag
from megatron.zero_bubble.core.formats.layout import check_ends
from megatron.zero_bubble.core.formats.layout_string import check_layout, read_layout
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.integration.megatron_lm.batches import check_batch_size, last_iteration
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.effects import Job
from megatron.zero_bubble.planning.job.host_memory import check_host_memory
from megatron.zero_bubble.planning.job.hybrid import (
    check_pattern,
    chunks_of_pattern,
    divide_pattern,
    is_hybrid,
    pattern_of,
)
from megatron.zero_bubble.planning.job.model import stated_vocab_size, uneven_layout
from megatron.zero_bubble.planning.job.options import check_softmax
from megatron.zero_bubble.planning.job.rules import check_job, check_optimizer, check_schedule
from megatron.zero_bubble.planning.job.runnable import is_megatrons_own
from megatron.zero_bubble.planning.job.settled import settle_options
from megatron.zero_bubble.planning.job.stages import place_stages
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.source import ScheduleSource

_ENGINE = "transformer_engine"


class Configured(NamedTuple):
    """A job with our configuration.

    Attributes:
        switched_off: one line per option of Megatron that was on and is off.
    """

    config: ZeroBubbleConfig
    source: ScheduleSource
    switched_off: list[str]


def configure(args: Any, run: RunOptions) -> Configured:
    """Build our configuration before Megatron validates the job's flags, and set the job's number of stages per rank.

    Raises:
        UserError: mutually exclusive flags, no pipeline, a number of stages that the schedule does not have, a layout
            or an option of the job that does not work.
    """
    check_pattern(args)
    check_job(Job(run, under_launcher=True, train_iters=last_iteration(args)))
    check_batch_size(args)
    ranks, asked = args.pipeline_model_parallel_size, chunks_of_job(args)
    config, source = place_stages(run, args, asked, peer_timeout_s=60.0 * args.distributed_timeout_minutes)
    placement = source.placement
    if placement.stage_to_rank[:ranks] != tuple(range(ranks)):
        raise UserError(
            f"Megatron-LM needs stages 0 to {ranks - 1} on ranks 0 to {ranks - 1}, in this order; the schedule has "
            f"them on ranks {list(placement.stage_to_rank[:ranks])}; choose another schedule"
        )
    if source.overlaps:  # Megatron's forward steps then return a plan of their layers
        args.overlap_moe_expert_parallel_comm = True
    # Before Megatron changes the options or rejects their combination.
    of_source = replace(run, setup=run.setup.running(source.setup))
    switched_off = settle_options([args], of_source, is_megatrons_own(placement))
    check_optimizer(run.setup.step, args)
    chunks = placement.num_stages // ranks
    check_ends(args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers, chunks)
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout is not None:
        check_layout(layout, ranks, _layers_of(args), placement.num_stages, args.mtp_num_layers or 0)
    if is_hybrid(args):
        divide_pattern(args, placement, stated_vocab_size(args))
    elif asked is None and layout is None:
        _ask_for(chunks, placement, args)
    return Configured(config, source, switched_off)


def check(args: Any, run: RunOptions, source: ScheduleSource, num_microbatches: Sequence[int]) -> None:
    """Reject options of the job, whose flags are now validated, that the schedule does not support.

    Args:
        num_microbatches: the numbers of microbatches that a data-parallel rank may run.

    Raises:
        UserError: an unsupported option; the message has the rule, the value and the remedy.
    """
    check_schedule(run, source, args.pipeline_model_parallel_size, num_microbatches, args)
    _check_weight_shards(args)
    _check_layers(args, is_sliced=source.setup.is_cut)
    if not is_megatrons_own(source.placement) and (args.save or args.load) and args.ckpt_format == "torch":
        raise UserError(
            "--ckpt-format torch stores checkpoints by rank, and this schedule has its stages on other ranks than "
            "Megatron's schedules; use --ckpt-format torch_dist"
        )


def check_offload(
    args: Any, config: ZeroBubbleConfig, source: ScheduleSource, num_microbatches: int, node_size: int
) -> None:
    """Check the limit of host memory, if there is one, against an estimate for equally many layers per stage.

    Args:
        num_microbatches: the largest number in an iteration.
        node_size: processes per node.

    Raises:
        UserError: a rank needs more.
    """
    select = config.selection(source)
    if config.host_memory is None or select is None:
        return
    layers = (args.num_layers // source.placement.num_stages,) * source.placement.num_stages
    check_host_memory(args, layers, config.host_memory, source.make(num_microbatches), select, node_size)


def _check_layers(args: Any, is_sliced: bool) -> None:
    """Reject what the layers of the job cannot do, which otherwise ends the run when it has built the model."""
    if is_sliced and not _has_engine(args):
        check_softmax(args.masked_softmax_fusion and (args.bf16 or args.fp16))


def _has_engine(args: Any) -> bool:
    return (getattr(args, "transformer_impl", None) or _ENGINE) == _ENGINE


def _check_weight_shards(args: Any) -> None:
    """Reject more weight shards than tensor-parallel ranks; every job of core_r0.19 or newer sets their number."""
    for expert in ("", "expert_"):
        flag = f"{expert}tensor_parallel_num_weight_shards"
        ranks = args.expert_tensor_parallel_size if expert else args.tensor_model_parallel_size
        shards = getattr(args, flag, ranks)
        if shards != ranks:
            raise UserError(
                f"zero-bubble schedules need {as_flag(flag)} to be {ranks}, one per "
                f"{expert.replace('_', ' ')}tensor-parallel rank, because the gradients of weights in more shards are "
                f"reduced where they are computed; got {shards}; drop the flag"
            )


def chunks_of_job(args: Any) -> int | None:
    """Return the stages per rank that the job's flags set; None if they set none.

    Raises:
        UserError: layers per stage that the layers do not divide into.
    """
    if (pattern := pattern_of(args)) is not None:
        return chunks_of_pattern(args, pattern)
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return int(args.num_virtual_stages_per_pipeline_rank)
    ranks = args.pipeline_model_parallel_size
    if getattr(args, "pipeline_model_parallel_layout", None) is not None:
        stages = len(read_layout(args.pipeline_model_parallel_layout))
        if stages % ranks:
            raise UserError(
                "--pipeline-model-parallel-layout must have equally many stages on every pipeline rank, got "
                f"{stages} stages and {ranks} ranks; change the layout or --pipeline-model-parallel-size"
            )
        return stages // ranks
    if (each := args.num_layers_per_virtual_pipeline_stage) is None:
        return None
    for which in ("first", "last"):
        if (count := getattr(args, f"decoder_{which}_pipeline_num_layers")) is not None:
            raise UserError(
                "--num-layers-per-virtual-pipeline-stage needs equally many layers on every rank, got "
                f"--decoder-{which}-pipeline-num-layers {count}; give --num-virtual-stages-per-pipeline-rank instead"
            )
    if each < 1 or _counted_layers(args) % (ranks * each):
        raise UserError(
            "--num-layers must be divisible by --pipeline-model-parallel-size * "
            f"--num-layers-per-virtual-pipeline-stage, got {_counted_layers(args)} and {ranks} * {each}; change one of "
            "them"
        )
    return _counted_layers(args) // ranks // int(each)


def check_format(run: RunOptions, file: str | None) -> None:
    """Reject a schedule for a job whose options are in a file (``--yaml-cfg``), which is not read here.

    Raises:
        UserError: both are given.
    """
    if run.has_schedule and file is not None:
        raise UserError("--yaml-cfg is not supported with a zero-bubble schedule; give the options as flags instead")


def _ask_for(chunks: int, placement: Placement, args: Any) -> None:
    """Set the job's flags to ``chunks`` stages per rank: of equal size, or else balanced by their work.

    With one stage per rank, whatever this does not know is left to Megatron.
    """
    if chunks == 1 and args.num_layers is None:
        return
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if first is not None or last is not None or _counted_layers(args) % placement.num_stages == 0:
        if chunks > 1:
            args.num_virtual_stages_per_pipeline_rank = chunks
        return
    args.pipeline_model_parallel_layout = uneven_layout(args, placement, stated_vocab_size(args))
    # The layout already includes embedding and loss, and Megatron accepts either the layout or these flags.
    args.account_for_embedding_in_pipeline_split = args.account_for_loss_in_pipeline_split = False


def _counted_layers(args: Any) -> int:
    embedding, loss = args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split
    return _layers_of(args) + bool(embedding) + bool(loss)


def _layers_of(args: Any) -> int:
    if args.num_layers is None:
        raise UserError("zero-bubble schedules need --num-layers, got none; train a model with one stack of layers")
    return int(args.num_layers)


def check_script(names: Mapping[str, Any]) -> None:
    """Reject the script of T5 before it rejects the pipeline itself, with a traceback.

    Args:
        names: those of the script.

    Raises:
        UserError: it has T5's class.
    """
    if "T5Model" in names:
        raise UserError(
            "zero-bubble schedules need a model with one stack of layers, because Megatron-LM trains no model with an "
            "encoder and a decoder in a pipeline; got a script with T5Model; train with "
            "--pipeline-model-parallel-size 1 and without a schedule"
        )

"""Check the flags before anything is started, with one function per topic.

Every rank runs the same checks on the same values, so all ranks stop together and none waits for another.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

from megatron.zero_bubble.core.errors import UserError, as_flag
from megatron.zero_bubble.core.formats.layout import check_ends, job_layers
from megatron.zero_bubble.core.formats.layout_string import check_layout as check_layout_string
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.ir.sizes import MOST_LAYERS, check_size
from megatron.zero_bubble.planning.job.arguments.batch_sizes import BatchSizes
from megatron.zero_bubble.planning.job.arguments.data_checks import check_data, check_documents, check_tokenizer
from megatron.zero_bubble.planning.job.arguments.model_checks import check_config
from megatron.zero_bubble.planning.job.arguments.tokenizer import known_vocab_size
from megatron.zero_bubble.planning.job.effects import Job
from megatron.zero_bubble.planning.job.graphs import LOCAL, graphs_of
from megatron.zero_bubble.planning.job.host_memory import check_host_memory
from megatron.zero_bubble.planning.job.model import uneven_layout
from megatron.zero_bubble.planning.job.rules import check_costs_file, check_job, check_schedule
from megatron.zero_bubble.planning.job.sequence_parallel import without_sequence_parallelism
from megatron.zero_bubble.planning.job.stages import place_stages

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "train_iters", "lr")


def check(args: Any, world_size: int, node_size: int | None = None) -> list[str]:
    """Check every rule and set the values that follow from other flags (data-parallel size, batch size, lengths).

    Args:
        node_size: processes per node; by default, all are on one.

    Returns:
        one line per flag that is switched off.

    Raises:
        UserError: the first rule that is violated.
    """
    switched_off = without_sequence_parallelism(args)
    check_layout(args, world_size, _REQUIRED)
    check_config(args)
    _check_precision(args)
    _check_graphs(args)
    _check_optimizer(args)
    check_tokenizer(args)
    check_data(args)
    _check_device(args)
    _check_checkpoint(args)
    _check_host_memory(args, node_size or world_size)
    return switched_off


def _check_graphs(args: Any) -> None:
    """Check the CUDA graphs of our script; a job of Megatron-LM's has more kinds."""
    if (graphs := graphs_of(args)) is None:
        return
    if graphs.implementation != LOCAL:
        raise UserError(
            f"this training script captures CUDA graphs of stages only (local); got {graphs.implementation}; train "
            "with Megatron-LM or Megatron-Bridge, or set --cuda-graph-impl none"
        )
    if args.run.observations.device == "cpu":
        raise UserError("--cuda-graph-impl local needs GPUs, got the cpu device; drop one of the flags")
    if not args.run.has_schedule:
        raise UserError("--cuda-graph-impl local needs --zero-bubble-schedule, whose stages it records; add it")


def check_layout(args: Any, world_size: int, required: tuple[str, ...] = _REQUIRED[:5]) -> None:
    """Check the rules on the model's layout and schedule."""
    check_sizes(args, world_size, required, "on the command line or with --config configs/gpt_tiny.yaml")
    _check_schedule(args)
    args.batch_sizes = BatchSizes.from_arguments(args)
    check_model(args, world_size)


def check_sizes(args: Any, world_size: int, required: tuple[str, ...] = _REQUIRED[:5], where: str = "as flags") -> None:
    """Check the parallel sizes, also of jobs that run Megatron-LM's script.

    Args:
        where: how a job gives its flags.
    """
    _check_required(args, required, where)
    _check_parallel_sizes(args, world_size)


def check_model(args: Any, world_size: int) -> None:
    """Check the model, the batch sizes and the schedule for them, also of jobs that run Megatron-LM's script.

    The stages of the job are placed (``args.placement``, ``args.source``), and its batch sizes known.
    """
    _check_layers(args)
    _check_widths(args)
    _check_batch_sizes(args)
    _check_experts(args, world_size)
    _check_overlaps(args)


def _check_required(args: Any, required: tuple[str, ...], where: str) -> None:
    if missing := [_flag(name) for name in required if getattr(args, name) is None]:
        raise UserError(f"a run needs {', '.join(missing)}; give them {where}")
    positive = (
        *_REQUIRED[:-1],
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "log_interval",
        "save_interval",
        "eval_interval",
        "exit_interval",
        "distributed_timeout_minutes",
        "make_vocab_size_divisible_by",
        "num_query_groups",
    )
    for name in positive:
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"{_flag(name)} must be positive, got {value}")
    if args.num_layers > MOST_LAYERS:
        raise UserError(f"--num-layers must be at most {MOST_LAYERS:,}, got {args.num_layers:,}; lower it")
    for name in ("eval_iters", "lr_warmup_iters", "num_workers", "lr", "min_lr", "clip_grad"):
        if (value := getattr(args, name)) is not None and value < 0:
            raise UserError(f"{_flag(name)} must not be negative, got {value}")


def _check_parallel_sizes(args: Any, world_size: int) -> None:
    sizes = {"tensor": args.tensor_model_parallel_size, "pipeline": args.pipeline_model_parallel_size}
    if args.context_parallel_size > 1:
        sizes["context"] = args.context_parallel_size
    model = math.prod(sizes.values())
    if world_size % model:
        raise UserError(
            f"the number of processes must be divisible by {' * '.join(sizes)} parallel size, got "
            f"{world_size} and {' * '.join(map(str, sizes.values()))}; "
            f"start a multiple of {model} processes, nodes times processes per node, or change the sizes"
        )
    args.data_parallel_size = world_size // model
    if args.sequence_parallel and args.seq_length % args.tensor_model_parallel_size:
        raise UserError(
            "with --sequence-parallel, --seq-length must be divisible by --tensor-model-parallel-size, got "
            f"{args.seq_length} and {args.tensor_model_parallel_size}; change either"
        )


def _check_layers(args: Any) -> None:
    chunks = args.virtual_pipeline_model_parallel_size
    if chunks is not None and (chunks < 1 or args.pipeline_model_parallel_size == 1):
        raise UserError(
            "--num-virtual-stages-per-pipeline-rank must be positive and needs 2 or more pipeline ranks, got "
            f"{chunks} and {args.pipeline_model_parallel_size}; drop the flag or raise --pipeline-model-parallel-size"
        )
    of_ends = (args.num_layers_in_first_pipeline_stage, args.num_layers_in_last_pipeline_stage)
    given = [count for count in of_ends if count is not None]
    if given and (args.pipeline_model_parallel_size < 2 or min(given) < 1):
        raise UserError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers must be positive and need 2 or "
            f"more pipeline ranks, got {given}; drop them or change --pipeline-model-parallel-size"
        )
    if (layout := args.pipeline_model_parallel_layout) is not None:
        predictions = args.mtp_num_layers or 0 if hasattr(args, "mtp_num_layers") else None  # only in Megatron-LM
        ranks = args.pipeline_model_parallel_size
        check_layout_string(layout, ranks, args.num_layers, args.placement.num_stages, predictions)
        return
    check_ends(*of_ends, chunks or 1)
    counted = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    ranks, each = args.pipeline_model_parallel_size - len(given), chunks or 1
    layers = args.num_layers + counted - sum(given)
    even = layers % (ranks * each) == 0 if ranks else layers == 0
    if even and layers >= ranks * each:
        return
    if not given and not counted and args.run.has_schedule:
        args.pipeline_model_parallel_layout = uneven_layout(args, args.placement, known_vocab_size(args))
        return
    stages = ranks * each
    what = f"{layers} layers{' (embedding or loss included)' if counted else ''}"
    raise UserError(
        f"--num-layers must be divisible by the number of pipeline stages, got {what} for {stages} "
        f"stages{' (first or last rank excluded)' if given else ''}; use "
        f"{args.num_layers + (-layers % stages if stages else -layers)} layers, change "
        "--pipeline-model-parallel-size, or give --pipeline-model-parallel-layout"
    )


def _check_widths(args: Any) -> None:
    heads, tensor_parallel = args.num_attention_heads, args.tensor_model_parallel_size
    if args.kv_channels is None and args.hidden_size % heads:
        raise UserError(
            f"--hidden-size must be divisible by --num-attention-heads, got {args.hidden_size} and {heads}; "
            "change either or give --kv-channels"
        )
    if heads % tensor_parallel:
        raise UserError(
            "--num-attention-heads must be divisible by --tensor-model-parallel-size, got "
            f"{heads} and {tensor_parallel}; change either"
        )
    if args.group_query_attention and (heads % args.num_query_groups or args.num_query_groups % tensor_parallel):
        raise UserError(
            "--num-query-groups must divide the attention heads and be divisible by --tensor-model-parallel-size, got "
            f"{args.num_query_groups} groups, {heads} heads, tensor-parallel size {tensor_parallel}; change the groups"
        )
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.max_position_embeddings < args.seq_length:
        raise UserError(
            "--max-position-embeddings must be at least --seq-length, got "
            f"{args.max_position_embeddings} and {args.seq_length}; raise --max-position-embeddings"
        )


def _check_batch_sizes(args: Any) -> None:
    args.global_batch_size = args.batch_sizes.final
    if args.run.balance is not None:
        check_documents(args)
    chunks, ranks = args.virtual_pipeline_model_parallel_size, args.pipeline_model_parallel_size
    check_size(ranks, args.global_batch_size // (args.micro_batch_size * args.data_parallel_size), chunks or 1)
    counts = [size // args.batch_sizes.granule for size in args.batch_sizes.steps]  # evaluations use the last size
    if args.run.has_schedule:
        check_schedule(args.run, args.source, ranks, counts, args)
    elif chunks:
        group = getattr(args, "microbatch_group_size_per_vp_stage", None) or ranks
        for count in counts:
            _check_groups(count, group, ranks)


def _check_groups(num_microbatches: int, group: int, num_ranks: int) -> None:
    """Check that Megatron's interleaved schedule can run its groups of microbatches; by default, one per rank."""
    if group == num_ranks and num_microbatches % num_ranks:
        raise UserError(
            "Megatron's interleaved schedule needs a microbatch count divisible by the number of pipeline "
            f"ranks, got {num_microbatches} and {num_ranks}; change --global-batch-size or --rampup-batch-size"
        )
    if not num_ranks <= group <= num_microbatches or 0 < num_microbatches % group < num_ranks:
        raise UserError(
            "Megatron's interleaved schedule needs groups, and a last group, of as many microbatches as pipeline ranks "
            f"or more, got {num_microbatches} microbatches in groups of {group} on {num_ranks} ranks; change "
            "--microbatch-group-size-per-virtual-pipeline-stage or --global-batch-size"
        )


def check_expert_numbers(args: Any) -> None:
    """Check the numbers of experts of a layer, of a token and of a rank.

    Raises:
        UserError: ranks that have no or different numbers of experts, or more experts of a token than there are.
    """
    experts, expert_parallel = args.num_moe_experts, args.expert_model_parallel_size
    if experts is None:
        if expert_parallel > 1:
            raise UserError(
                f"--expert-model-parallel-size {expert_parallel} needs experts; give --num-experts or drop the flag"
            )
        return
    if experts % expert_parallel:
        raise UserError(
            "--num-experts must be divisible by --expert-model-parallel-size, got "
            f"{experts} and {expert_parallel}; change either"
        )
    if args.moe_router_topk > experts:
        raise UserError(
            f"--moe-router-topk must be at most --num-experts, got {args.moe_router_topk} and {experts}; change either"
        )


def _check_experts(args: Any, world_size: int) -> None:
    check_expert_numbers(args)
    if args.num_moe_experts is None:
        return
    expert_parallel = args.expert_model_parallel_size
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    model = tensor * expert_parallel * args.pipeline_model_parallel_size
    if world_size % model:
        raise UserError(
            "the number of processes must be divisible by expert-tensor * expert * pipeline parallel size, got "
            f"{world_size} and {tensor} * {expert_parallel} * {args.pipeline_model_parallel_size}; change the sizes"
        )
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise UserError("--num-experts with tensor parallelism needs --sequence-parallel; add --sequence-parallel")


def _check_overlaps(args: Any) -> None:
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        raise UserError(
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; add both or drop it"
        )


def _check_precision(args: Any) -> None:
    if args.bf16 and args.fp16:
        raise UserError("--bf16 and --fp16 are mutually exclusive; keep one")
    if args.fp16 and args.loss_scale is None:
        args.check_for_nan_in_loss_and_grad = False  # the loss scaler reacts to overflows
    if args.grad_reduce_in_bf16 and args.accumulate_allreduce_grads_in_fp32:
        raise UserError("--grad-reduce-in-bf16 excludes --accumulate-allreduce-grads-in-fp32; keep one of them")


def _check_optimizer(args: Any) -> None:
    if args.use_distributed_optimizer and args.optimizer == "sgd":
        raise UserError(
            "--use-distributed-optimizer needs --optimizer adam, because megatron-core's distributed optimizer divides "
            "the state of no other; got --optimizer sgd; drop one of them"
        )
    if args.min_lr > args.lr:
        raise UserError(f"--min-lr must be at most --lr, got {args.min_lr} and {args.lr}; change either")
    if args.lr_decay_iters is None:
        args.lr_decay_iters = args.train_iters
    if args.lr_warmup_fraction is not None:
        if args.lr_warmup_iters or not 0 <= args.lr_warmup_fraction < 1:
            raise UserError(
                "--lr-warmup-fraction must be in [0, 1) and excludes --lr-warmup-iters, got "
                f"{args.lr_warmup_fraction} and {args.lr_warmup_iters}; change the fraction or keep one flag"
            )
        args.lr_warmup_iters = int(args.lr_warmup_fraction * args.lr_decay_iters)
    if args.lr_warmup_iters >= args.lr_decay_iters:
        raise UserError(
            "the learning rate's warm-up must be shorter than --lr-decay-iters, got "
            f"{args.lr_warmup_iters} and {args.lr_decay_iters} iterations; lower --lr-warmup-iters"
        )


def _check_device(args: Any) -> None:
    if args.distributed_backend == "nccl" and args.run.observations.device == "cpu":
        refuse_nccl_on_cpu()


def refuse_nccl_on_cpu() -> NoReturn:
    """Raise the error of a run on CPU ranks that asks for NCCL.

    Raises:
        UserError: always.
    """
    raise UserError("--distributed-backend nccl needs GPUs, got the cpu device; use gloo or drop the flag")


def _check_checkpoint(args: Any) -> None:
    if args.load and args.optimizer == "sgd" and args.load_optim and not args.finetune:
        raise UserError(
            "--load cannot restore the state of --optimizer sgd, because megatron-core 0.16 cannot describe it before "
            "the first step; add --no-load-optim"
        )
    for flag, directory in (("--save", args.save), ("--load", args.load)):
        if directory and Path(directory).exists() and not Path(directory).is_dir():
            raise UserError(f"{flag} must name a directory, got {directory}, which is a file; give another path")


def _check_schedule(args: Any) -> None:
    chunks = args.virtual_pipeline_model_parallel_size
    shows_stock = args.pipeline_model_parallel_size > 1 and chunks is None
    check_job(Job(args.run, shows_stock_passes=shows_stock, train_iters=args.train_iters))
    check_costs_file(args.run)
    if not args.run.has_schedule:
        args.source = None
        args.placement = Placement.interleaved(args.pipeline_model_parallel_size, max(1, chunks or 1))
        return
    timeout_s = args.distributed_timeout_minutes * 60
    args.zero_bubble, args.source = place_stages(args.run, args, chunks, peer_timeout_s=timeout_s)
    args.placement = args.source.placement
    if args.source.overlaps:  # forward steps then return a plan of their layers
        args.overlap_moe_expert_parallel_comm = True
    own_chunks = args.placement.num_stages // args.pipeline_model_parallel_size
    args.virtual_pipeline_model_parallel_size = own_chunks if own_chunks > 1 else None


def _check_host_memory(args: Any, node_size: int) -> None:
    select = None if args.source is None else args.zero_bubble.selection(args.source)
    if select is None or args.zero_bubble.host_memory is None:
        return
    schedule = args.source.make(args.batch_sizes.final // args.batch_sizes.granule)
    check_host_memory(args, job_layers(args), args.zero_bubble.host_memory, schedule, select, node_size)


_FLAGS = {"virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank"}


def _flag(name: str) -> str:
    return as_flag(_FLAGS.get(name, name))

"""Compatibility rules between a job and its schedule, for this package's training loop and for Megatron-LM jobs.

Two tables define when each ``--zero-bubble-*`` flag has an effect, and which Megatron options no schedule supports.
Rules that depend on the schedule itself, such as its number of microbatches, are checked on the schedule. All rules are
checked before training starts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Schedule
from megatron.zero_bubble.ir.vocabulary import algorithm_of
from megatron.zero_bubble.job.balance import check_balance
from megatron.zero_bubble.job.flags import has_schedule, records, vocabulary_algorithm
from megatron.zero_bubble.job.runnable import check_runnable
from megatron.zero_bubble.job.shards import check_chunks, check_shards
from megatron.zero_bubble.job.slices import check_slices
from megatron.zero_bubble.job.source import AUTO, ScheduleSource
from megatron.zero_bubble.schedules import has_units, sliced


@dataclass(frozen=True)
class Job:
    """The properties of a job that decide whether a flag has an effect.

    Attributes:
        options: the parsed ``--zero-bubble-*`` flags.
        under_launcher: whether Megatron-LM's own training loop runs.
        shows_stock_passes: whether the passes of Megatron's own 1F1B can be observed if no schedule is selected.
    """

    options: argparse.Namespace
    under_launcher: bool = False
    shows_stock_passes: bool = False

    @property
    def schedule(self) -> str:
        """The schedule's name or file, or ``"none"``."""
        return self.options.zero_bubble_schedule or self.options.zero_bubble_schedule_file or "none"

    @property
    def has_schedule(self) -> bool:
        """Whether a zero-bubble schedule is selected."""
        return has_schedule(self.options)

    @property
    def plans(self) -> bool:
        """Whether the schedule is planned during the run."""
        return self.options.zero_bubble_schedule == AUTO


class _Rule(NamedTuple):
    """Flags (without ``--zero-bubble-``), when they have an effect, and the error text after the flag otherwise."""

    flags: tuple[str, ...]
    applies: Callable[[Job], bool]
    otherwise: str


_RULES = (
    _Rule(
        ("post-validation",),
        lambda job: job.has_schedule,
        "needs a zero-bubble schedule, because its passes validate the optimizer step, got none; give "
        "--zero-bubble-schedule zb-h2",
    ),
    _Rule(
        (
            "exact",
            "fuse-wgrad",
            "wgrad-stream",
            "post-receives",
            "nccl-ctas",
            "offload",
            "host-memory",
            "shard-weights",
            "balance-microbatches",
        ),
        lambda job: job.has_schedule,
        "has no effect without a zero-bubble schedule; give --zero-bubble-schedule zb-h1 or drop the flag",
    ),
    _Rule(
        ("balance-microbatches",),
        lambda job: not job.under_launcher,
        "needs samples of their own lengths and a number of microbatches per replica, but Megatron-LM pads or packs "
        "every sample to --seq-length and counts one number of microbatches for all replicas; drop the flag, or train "
        "with scripts/pretrain_gpt.py",
    ),
    _Rule(
        ("shard-transport",),
        lambda job: bool(job.options.zero_bubble_shard_weights),
        "exchanges the shards of --zero-bubble-shard-weights, which is not given; drop the flag or add it",
    ),
    _Rule(
        ("unit-microbatches",),
        lambda job: bool(job.options.zero_bubble_shard_weights) or has_units(job.options.zero_bubble_schedule),
        "is for zero-pp, or for --zero-bubble-shard-weights, got {schedule}; drop the flag or give "
        "--zero-bubble-schedule zero-pp",
    ),
    _Rule(
        ("whole-stages",),
        lambda job: bool(job.options.zero_bubble_shard_weights),
        "is for --zero-bubble-shard-weights; drop it or give both",
    ),
    _Rule(
        ("num-slices", "slice-ends", "attention-share"),
        lambda job: (
            job.plans
            or job.options.zero_bubble_schedule in sliced()
            or bool(job.options.zero_bubble_balance_microbatches)
        ),
        "works only with a schedule of slices or zb-auto, got {schedule}; drop the flag or give --zero-bubble-schedule "
        "seq-zb-h1",
    ),
    _Rule(
        ("vocabulary-parallel",),
        lambda job: job.has_schedule,
        "needs a zero-bubble schedule, into which its passes are inserted, got none; give --zero-bubble-schedule zb-h1 "
        "or drop the flag",
    ),
    _Rule(
        ("recompute-logits",),
        lambda job: vocabulary_algorithm(job.options) is not None or bool(job.options.zero_bubble_schedule_file),
        "has no effect without vocabulary parallelism; give --zero-bubble-vocabulary-parallel 2 or drop the flag",
    ),
    _Rule(
        ("placement", "memory-limit", "costs"),  # of zero-pp, the configuration says which
        lambda job: job.plans or has_units(job.options.zero_bubble_schedule),
        "works only with --zero-bubble-schedule zb-auto, got {schedule}; drop the flag or choose zb-auto",
    ),
    _Rule(
        ("rollback",),
        lambda job: bool(job.options.zero_bubble_post_validation),
        "has no effect without --zero-bubble-post-validation; add it or drop the flag",
    ),
    _Rule(
        ("trace", "log-bubble"),
        lambda job: job.has_schedule or not job.under_launcher,
        "needs a zero-bubble schedule to measure, got none; give --zero-bubble-schedule 1f1b, which has the order of "
        "stock Megatron",
    ),
    _Rule(
        ("record-costs",),
        lambda job: job.has_schedule,
        "needs a schedule that splits every backward into B and W, got none; give --zero-bubble-schedule zb-h1",
    ),
    _Rule(
        ("trace", "log-bubble"),
        lambda job: job.has_schedule or job.shows_stock_passes,
        "needs a zero-bubble schedule, or 2 or more pipeline ranks with one stage each, because passes of stock "
        "Megatron can be observed only then; change the pipeline or drop the flag",
    ),
    _Rule(
        ("trace-iterations",),
        lambda job: records(job.options),
        "has no effect without --zero-bubble-trace or --zero-bubble-record-costs; give --zero-bubble-trace DIR",
    ),
    _Rule(
        ("wgrad-stream",),
        lambda job: not (records(job.options) or job.options.zero_bubble_log_bubble),
        "hides W passes from --zero-bubble-trace, --zero-bubble-record-costs and --zero-bubble-log-bubble, which time "
        "only the main stream; drop one of the flags",
    ),
)


def check_flags(job: Job) -> None:
    """Reject flags that have no effect in this job.

    Raises:
        UserError: the rule, the given value and the remedy.
    """
    if job.options.zero_bubble_schedule and job.options.zero_bubble_schedule_file:
        raise UserError("--zero-bubble-schedule and --zero-bubble-schedule-file exclude each other; give one of them")
    for rule in _RULES:
        for flag in rule.flags:
            value = getattr(job.options, "zero_bubble_" + flag.replace("-", "_"))
            if value is not None and not rule.applies(job):
                raise UserError(f"{_spelled(flag, value)} {rule.otherwise.format(schedule=job.schedule)}")


def _spelled(flag: str, value: object) -> str:
    """The flag as the user gave it, with its value if that is a string."""
    if value is False:
        return f"--no-zero-bubble-{flag}"
    return f"--zero-bubble-{flag} {value}" if isinstance(value, str) else f"--zero-bubble-{flag}"


def check_costs_file(options: argparse.Namespace) -> None:
    """Raise UserError if ``--zero-bubble-record-costs`` names a folder."""
    file = options.zero_bubble_record_costs
    if file and Path(file).is_dir():
        raise UserError(f"--zero-bubble-record-costs needs a file, got the folder {file}; name a file")


def check_schedule(
    options: argparse.Namespace, source: ScheduleSource, num_ranks: int, num_microbatches: Sequence[int], job: Any
) -> None:
    """Reject a schedule that does not fit the job's batch sizes, its sequences or the requested measurements.

    Args:
        job: the job's flags; those of its sequences are read, and those that slices do not support.
        num_microbatches: microbatches per data-parallel rank, of every training and evaluation batch size of the job.

    Raises:
        UserError: the rule, the values and the remedy.
    """
    counts = sorted(set(num_microbatches))
    if options.zero_bubble_schedule_file:
        _check_file(source.make(counts[0]), num_ranks, counts)
    if options.zero_bubble_balance_microbatches:
        check_balance(options, source, job)
    schedule = source.make(counts[0])
    check_slices(schedule.slices, options.zero_bubble_slice_ends, job)
    if options.zero_bubble_shard_weights:
        check_shards(job)
        check_chunks(schedule.placement)
    check_options(job, num_slices=len(schedule.slices), vocabulary=algorithm_of(schedule) is not None)
    if options.zero_bubble_record_costs and any(source.make(count).fused for count in counts):
        raise UserError(
            "--zero-bubble-record-costs needs a schedule that splits every backward into B and W, got "
            f"{source.name}; give --zero-bubble-schedule zb-h1"
        )


def _check_file(schedule: Schedule, num_ranks: int, counts: list[int]) -> None:
    if len(counts) > 1:
        raise UserError(
            f"the schedule file is for {schedule.num_microbatches} microbatches, but this job runs "
            f"{', '.join(map(str, counts[:-1]))} and {counts[-1]} (batch ramp-up or evaluation); give "
            "--zero-bubble-schedule NAME, which fits all of them, or use a single batch size (when resuming after a "
            "ramp-up, drop --rampup-batch-size)"
        )
    check_runnable(schedule, num_ranks, counts[0])


class _Option(NamedTuple):
    """A Megatron option that zero-bubble schedules do not support.

    Attributes:
        allowed: the only supported value; None is supported too.
        remedy: the remedy for another value; default: drop the flag with the option's name.
        anywhere: whether the rule applies to every placement; False limits it to placements other than Megatron's.
        post_validation: whether the rule applies only with post-validation.
        slices: whether the rule applies only with sequence slices.
        vocabulary: whether the rule applies only with vocabulary parallelism.
    """

    name: str
    allowed: Any
    why: str
    remedy: str = ""
    anywhere: bool = True
    post_validation: bool = False
    slices: bool = False
    vocabulary: bool = False

    @property
    def subject(self) -> str:
        """What needs the option to have its allowed value."""
        if self.vocabulary:
            return "schedules with vocabulary parallelism"
        if self.slices:
            return "schedules with sequence slices"
        if self.post_validation:
            return "schedules with post-validation"
        return "zero-bubble schedules" if self.anywhere else "schedules with stages on a V"


_GRAPHS = "Megatron captures CUDA graphs in the order of its own 1F1B"
_FSDP = "FSDP does not reduce gradients through DistributedDataParallel"
_MAXIMUM = "forwards that run again would count twice in the maximum of the attention logits"
_OPTIONS = (
    _Option("enable_cuda_graph", False, _GRAPHS),  # before 0.15, graphs have separate flags
    _Option("external_cuda_graph", False, _GRAPHS),
    _Option("cuda_graph_impl", "none", _GRAPHS, "set --cuda-graph-impl none"),
    _Option("overlap_moe_expert_parallel_comm", False, "this option itself orders B and W inside each layer"),
    _Option("delay_wgrad_compute", False, "the schedule already defers weight gradients"),
    _Option("overlap_dispatch_backward_with_experts_wgrad", False, "this option runs the W of experts inside their B"),
    _Option(
        "use_transformer_engine_op_fuser",
        False,
        "fused operations compute weight gradients that the schedule must defer to W",
    ),
    _Option("fine_grained_activation_offloading", False, "offloading assumes Megatron's order of chunks"),
    _Option(
        "cpu_offloading",
        False,
        "offloading assumes Megatron's order of backward passes",
        "drop --cpu-offloading-num-layers",
    ),
    _Option("cpu_offloading_num_layers", 0, "offloading assumes Megatron's order of backward passes"),
    _Option("moe_paged_stash", False, "Megatron resets the pages only in its own schedules"),
    _Option(
        "overlap_p2p_comm_warmup_flush",
        False,
        "the schedule decides which passes overlap with messages",
        "drop --overlap-p2p-communication-warmup-flush",
    ),
    _Option("variable_seq_lengths", False, "receives are posted before the shape is known", "pad to --seq-length"),
    _Option("use_ring_exchange_p2p", False, "zero-bubble schedules post their own sends and receives"),
    _Option("use_legacy_models", False, "legacy models bypass the linears whose weight gradients are deferred"),
    _Option("use_custom_fsdp", False, _FSDP),
    _Option("use_megatron_fsdp", False, _FSDP),
    _Option("use_torch_fsdp2", False, _FSDP),
    _Option("overlap_param_gather_with_optimizer_step", False, "this overlap assumes Megatron's order of chunks"),
    _Option("mtp_num_layers", None, "Megatron puts multi-token prediction on the last rank", anywhere=False),
    _Option("init_model_with_meta_device", False, "a tied embedding is copied when the model is built", anywhere=False),
    _Option("logits_save_dir", None, "Megatron looks for the output layer on the last rank", anywhere=False),
    _Option("logits_load_dir", None, "Megatron looks for the output layer on the last rank", anywhere=False),
    _Option("qk_clip", False, _MAXIMUM, post_validation=True),
    _Option("log_max_attention_logit", False, _MAXIMUM, post_validation=True),
    _Option(
        "reuse_grad_buf_for_mxfp8_param_ag",
        False,
        "weights are gathered into the memory of the gradients, which the validation may need",
        post_validation=True,
    ),
    _Option(
        "optimizer_cpu_offload",
        False,
        "the optimizer on the host keeps copies that a rollback does not restore",
        post_validation=True,
    ),
    _Option("optimizer_cuda_graph", False, "a captured step cannot be repeated or delayed", post_validation=True),
    _Option("perform_rl_step", False, "rollouts would use weights that may be undone", post_validation=True),
    _Option("vision_pretraining", False, "the teacher follows weights that may be undone", post_validation=True),
    _Option("moe_routing_trace_path", None, "forwards that run again would be traced twice", post_validation=True),
    _Option("context_parallel_size", 1, "context parallelism distributes every sequence over its ranks", slices=True),
    _Option("mtp_num_layers", None, "multi-token prediction reads tokens of the next slice", slices=True),
    _Option("multi_latent_attention", False, "its rotary embeddings begin at the first token", slices=True),
    _Option("experimental_attention_variant", None, "its layers do not keep keys and values", slices=True),
    _Option("sft", False, "its samples are packed, and a slice attends to the whole sequence before it", slices=True),
    _Option("context_parallel_size", 1, "every rank has rows for whole sequences", vocabulary=True),
    _Option("mtp_num_layers", None, "multi-token prediction has an output layer of its own", vocabulary=True),
    _Option("label_smoothing_factor", 0.0, "it needs the logits of all tokens in the loss", vocabulary=True),
    _Option("logits_save_dir", None, "no rank has whole logits", vocabulary=True),
    _Option("logits_load_dir", None, "no rank has whole logits", vocabulary=True),
    _Option("defer_embedding_wgrad_compute", False, "T already defers the weight gradient", vocabulary=True),
    _Option("use_mup", False, "its scaled logits are not supported", vocabulary=True),
    _Option("init_model_with_meta_device", False, "initial weights are cut into shards", vocabulary=True),
)


def check_options(
    values: Any, in_place: bool = True, post_validation: bool = False, num_slices: int = 1, vocabulary: bool = False
) -> None:
    """Reject Megatron options that zero-bubble schedules do not support.

    Args:
        values: a ``TransformerConfig``, or the flags of a Megatron-LM job; missing options count as disabled.
        in_place: whether every stage is on the rank where Megatron itself would put it.
        post_validation: whether optimizer steps are validated in the next iteration.
        num_slices: number of slices of a sequence.
        vocabulary: whether the vocabulary is divided over all pipeline ranks.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    for option in _OPTIONS:
        value = getattr(values, option.name, option.allowed)
        applies = (
            (option.anywhere or not in_place)
            and (post_validation or not option.post_validation)
            and (num_slices > 1 or not option.slices)
            and (vocabulary or not option.vocabulary)
        )
        if applies and value not in (option.allowed, None):
            raise UserError(
                f"{option.subject} need {option.name}={option.allowed!r}, because {option.why}; got {value!r}; "
                + (option.remedy or f"drop --{option.name.replace('_', '-')}")
            )
    recipe = getattr(values, "fp8_recipe", None)
    if post_validation and getattr(values, "fp8", None) and getattr(recipe, "value", recipe) == "delayed":
        raise UserError(
            "post-validation does not support FP8 with delayed scaling, because forwards that run again would count "
            f"twice in the history of maxima; got --fp8-format {values.fp8} --fp8-recipe delayed; give --fp8-recipe "
            "tensorwise, or drop --zero-bubble-post-validation"
        )
    balancing = getattr(values, "moe_router_load_balancing_type", None)
    if num_slices > 1 and "seq_aux_loss" in (balancing if isinstance(balancing, (list, tuple)) else (balancing,)):
        raise UserError(
            "schedules with sequence slices do not support an auxiliary loss per sequence, because no pass sees a "
            f"whole sequence; got --moe-router-load-balancing-type seq_aux_loss and {num_slices} slices; give aux_loss"
        )
    group = getattr(values, "microbatch_group_size_per_vp_stage", None)
    # Megatron ignores the group size without virtual stages; its default is the number of pipeline ranks.
    grouped = getattr(values, "virtual_pipeline_model_parallel_size", None) is not None
    if grouped and group not in (None, values.pipeline_model_parallel_size):
        raise UserError(
            "zero-bubble schedules support only a microbatch group size equal to the number of pipeline ranks, got "
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} and {values.pipeline_model_parallel_size} "
            "ranks; drop the flag"
        )

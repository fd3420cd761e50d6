"""What a job and a schedule must agree on: the rules of the training loop of this package and of a Megatron-LM job.

Two tables: where each of our flags means something, and which options of Megatron a schedule cannot honour. What
depends on the schedule itself, on its batch sizes and on its unsplit backwards, is asked of the schedule. Everything is
refused before anything starts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Kind, Placement, Schedule
from megatron.zero_bubble.job.config import ZeroBubbleConfig
from megatron.zero_bubble.job.flags import config_of, has_schedule, records
from megatron.zero_bubble.job.source import AUTO, ScheduleSource


@dataclass(frozen=True)
class Job:
    """What decides whether a flag means something.

    Attributes:
        options: our flags.
        under_launcher: Megatron-LM's own training loop runs.
        shows_stock_passes: without a schedule of ours, Megatron's 1F1B runs where its passes can be observed.
    """

    options: argparse.Namespace
    under_launcher: bool = False
    shows_stock_passes: bool = False

    @property
    def schedule(self) -> str:
        """Its name, or its file, or none."""
        return self.options.zero_bubble_schedule or self.options.zero_bubble_schedule_file or "none"

    @property
    def has_schedule(self) -> bool:
        """Whether one of ours runs."""
        return has_schedule(self.options)

    @property
    def plans(self) -> bool:
        """Whether the schedule is planned during the run."""
        return self.options.zero_bubble_schedule == AUTO


class _Rule(NamedTuple):
    """Flags without ``--zero-bubble-``, where they mean something, and what follows the flag in a refusal."""

    flags: tuple[str, ...]
    applies: Callable[[Job], bool]
    otherwise: str


_RULES = (
    _Rule(
        ("post-validation",),
        lambda job: not job.under_launcher,
        "is not supported in a Megatron-LM job, because its training loop cannot handle optimizer steps that are "
        "undone; drop the flag, or train with scripts/pretrain_gpt.py of this package",
    ),
    _Rule(
        ("post-validation",),
        lambda job: job.has_schedule,
        "needs a zero-bubble schedule, whose passes validate a step, got none; give --zero-bubble-schedule zb-h2",
    ),
    _Rule(
        ("exact", "fuse-wgrad", "wgrad-stream"),
        lambda job: job.has_schedule,
        "has no effect without a zero-bubble schedule; give --zero-bubble-schedule zb-h1 or drop the flag",
    ),
    _Rule(
        ("placement", "memory-limit"),
        lambda job: job.plans,
        "works only with --zero-bubble-schedule zb-auto, got {schedule}; drop the flag or choose zb-auto",
    ),
    _Rule(
        ("rollback",),
        lambda job: bool(job.options.zero_bubble_post_validation),
        "has no effect without --zero-bubble-post-validation; add it or drop the flag",
    ),
    _Rule(
        ("trace", "record-costs", "log-bubble"),
        lambda job: job.has_schedule or not job.under_launcher,
        "measures a zero-bubble schedule, got none; give --zero-bubble-schedule 1f1b to see the order of stock "
        "Megatron",
    ),
    _Rule(
        ("record-costs",),
        lambda job: job.has_schedule,
        "needs a schedule that splits every backward into B and W, got none; give --zero-bubble-schedule zb-h1",
    ),
    _Rule(
        ("trace", "log-bubble"),
        lambda job: job.has_schedule or job.shows_stock_passes,
        "without a zero-bubble schedule needs 2 or more pipeline ranks with one stage each, whose passes Megatron "
        "shows; change the pipeline or drop the flag",
    ),
    _Rule(
        ("trace-iterations",),
        lambda job: records(job.options),
        "has no effect without --zero-bubble-trace or --zero-bubble-record-costs; give --zero-bubble-trace DIR",
    ),
    _Rule(
        ("wgrad-stream",),
        lambda job: not (records(job.options) or job.options.zero_bubble_log_bubble),
        "hides every W from --zero-bubble-trace, --zero-bubble-record-costs and --zero-bubble-log-bubble, because "
        "passes are timed on their own stream; drop one of them",
    ),
)


def check_flags(job: Job) -> None:
    """Refuse a flag that is given where it means nothing.

    Raises:
        UserError: the rule, what was given and the remedy.
    """
    if job.options.zero_bubble_schedule and job.options.zero_bubble_schedule_file:
        raise UserError("--zero-bubble-schedule and --zero-bubble-schedule-file exclude each other; keep one")
    for rule in _RULES:
        for flag in rule.flags:
            value = getattr(job.options, "zero_bubble_" + flag.replace("-", "_"))
            if value is not None and not rule.applies(job):
                raise UserError(f"{_spelled(flag, value)} {rule.otherwise.format(schedule=job.schedule)}")


def _spelled(flag: str, value: object) -> str:
    """A flag and its value as given, as far as it is one word."""
    if value is False:
        return f"--no-zero-bubble-{flag}"
    return f"--zero-bubble-{flag} {value}" if isinstance(value, str) else f"--zero-bubble-{flag}"


def check_costs_file(options: argparse.Namespace) -> None:
    """Raises UserError where costs cannot be written because a folder is in the way."""
    file = options.zero_bubble_record_costs
    if file and Path(file).is_dir():
        raise UserError(f"--zero-bubble-record-costs needs a file, got the folder {file}; name a file")


def check_schedule(
    options: argparse.Namespace, source: ScheduleSource, num_ranks: int, num_microbatches: Sequence[int]
) -> None:
    """Refuse a schedule that does not fit the iterations and evaluations of the job, or what is measured of it.

    Args:
        num_microbatches: every number of microbatches that the job has, of a data-parallel rank.

    Raises:
        UserError: the rule, the values and the remedy.
    """
    if options.zero_bubble_schedule == AUTO:
        return  # made for each number of microbatches, with every backward split
    counts = sorted(set(num_microbatches))
    if options.zero_bubble_schedule_file:
        _check_file(source.make(counts[0]), num_ranks, counts)
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
            "--zero-bubble-schedule NAME, which fits all of them, or one batch size: a run that is resumed after its "
            "ramp-up drops --rampup-batch-size"
        )
    check_runnable(schedule, num_ranks, counts[0])


class _Option(NamedTuple):
    """A Megatron option that a schedule cannot honour.

    Attributes:
        allowed: the one value that works, beside None.
        remedy: what to do about another value; default: drop the flag of the option's name.
        anywhere: also where the stages are where Megatron itself would have them.
    """

    name: str
    allowed: Any
    why: str
    remedy: str = ""
    anywhere: bool = True


_GRAPHS = "Megatron captures its graphs in the order of its own 1F1B"
_FSDP = "it does not reduce gradients through DistributedDataParallel"
_OPTIONS = (
    _Option("enable_cuda_graph", False, _GRAPHS),  # before 0.15 graphs have flags of their own
    _Option("external_cuda_graph", False, _GRAPHS),
    _Option("cuda_graph_impl", "none", _GRAPHS, "set --cuda-graph-impl none"),
    _Option("overlap_moe_expert_parallel_comm", False, "it schedules B and W inside a layer itself"),
    _Option("delay_wgrad_compute", False, "it defers W a second time"),
    _Option("overlap_dispatch_backward_with_experts_wgrad", False, "it runs the W of experts inside their B"),
    _Option(
        "use_transformer_engine_op_fuser",
        False,
        "fused operations compute the weight gradients of modules whose gradients wait for W",
    ),
    _Option("fine_grained_activation_offloading", False, "it assumes Megatron's order of chunks"),
    _Option(
        "cpu_offloading",
        False,
        "it assumes Megatron's order of backwards",
        "drop --cpu-offloading-num-layers",
    ),
    _Option("cpu_offloading_num_layers", 0, "it assumes Megatron's order of backwards"),
    _Option("moe_paged_stash", False, "Megatron resets its pages at the head of its own iterations"),
    _Option(
        "overlap_p2p_comm_warmup_flush",
        False,
        "messages overlap passes in the order of the schedule",
        "drop --overlap-p2p-communication-warmup-flush",
    ),
    _Option("variable_seq_lengths", False, "receives are posted before the shape is known", "pad to --seq-length"),
    _Option("use_ring_exchange_p2p", False, "the transport posts its own sends and receives"),
    _Option("use_legacy_models", False, "legacy models bypass the linears whose weight gradients wait for W"),
    _Option("use_custom_fsdp", False, _FSDP),
    _Option("use_megatron_fsdp", False, _FSDP),
    _Option("use_torch_fsdp2", False, _FSDP),
    _Option("overlap_param_gather_with_optimizer_step", False, "it assumes Megatron's order of chunks"),
    _Option("mtp_num_layers", None, "Megatron has multi-token prediction on the last rank", anywhere=False),
    _Option("init_model_with_meta_device", False, "a tied embedding is copied when the model is built", anywhere=False),
    _Option("logits_save_dir", None, "Megatron looks for the output layer on the last rank", anywhere=False),
    _Option("logits_load_dir", None, "Megatron looks for the output layer on the last rank", anywhere=False),
)


def check_options(values: Any, in_place: bool = True) -> None:
    """Refuse Megatron options that a schedule cannot honour.

    Args:
        values: a ``TransformerConfig``, or the flags of a Megatron-LM job; options that it lacks are off.
        in_place: whether the stages are on the ranks where Megatron would have them.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    for option in _OPTIONS:
        value = getattr(values, option.name, option.allowed)
        if value not in (option.allowed, None) and (option.anywhere or not in_place):
            raise UserError(
                f"{'zero-bubble schedules' if option.anywhere else 'schedules with stages on a V'} need {option.name}="
                f"{option.allowed!r}, because {option.why}; got {value!r}; "
                + (option.remedy or f"drop --{option.name.replace('_', '-')}")
            )
    group = getattr(values, "microbatch_group_size_per_vp_stage", None)
    grouped = getattr(values, "virtual_pipeline_model_parallel_size", None) is not None  # else Megatron ignores it
    if grouped and group not in (None, values.pipeline_model_parallel_size):  # by default Megatron makes them equal
        raise UserError(
            "zero-bubble schedules run microbatches in groups of the pipeline's ranks or not in groups at all, got "
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} and {values.pipeline_model_parallel_size} "
            "ranks; drop the flag"
        )


def place_stages(
    options: argparse.Namespace, job: Any, num_chunks: int | None, peer_timeout_s: float
) -> tuple[ZeroBubbleConfig, ScheduleSource]:
    """The configuration that our flags ask for, and its schedules, with stages where Megatron can have them.

    Args:
        options: our flags.
        job: the flags of the job, as far as its pipeline is concerned.
        num_chunks: stages per rank, where the job says how many.

    Raises:
        UserError: no pipeline, flags that exclude each other, a bad schedule file, or stages that the schedule does
            not have.
    """
    ranks = job.pipeline_model_parallel_size
    if ranks < 2:
        raise UserError(
            "a zero-bubble schedule needs a pipeline of 2 or more ranks, got --pipeline-model-parallel-size "
            f"{ranks}; raise it or drop the schedule"
        )
    config = config_of(options, measure_memory=records(options), peer_timeout_s=peer_timeout_s)
    if config.takes_chunks:
        config = replace(config, num_chunks=num_chunks)
    source = config.sources()(ranks)
    placement = source.placement
    check_placement(placement, ranks)
    chunks = placement.num_stages // ranks
    if num_chunks not in (None, chunks):
        raise UserError(
            f"the schedule has {chunks} stage{'s' * (chunks > 1)} per rank, the job {num_chunks}; drop "
            "--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank or "
            "--pipeline-model-parallel-layout"
        )
    if chunks > 1 and not getattr(job, "overlap_p2p_comm", True):  # else Megatron ignores it
        raise UserError(
            "--no-overlap-p2p-communication is for Megatron's own interleaved schedule, got a zero-bubble schedule, "
            "whose messages always overlap its passes; drop one of the two"
        )
    return config, source


def check_placement(placement: Placement, num_ranks: int) -> None:
    """Refuse stages where Megatron cannot be made to have them.

    Raises:
        UserError: a rank without one of the first P stages, one of the next P, and so on; or a tied embedding that
            Megatron would look for elsewhere.
    """
    if placement.num_ranks != num_ranks:
        raise UserError(
            f"the schedule is for {placement.num_ranks} ranks, but the job runs {num_ranks} pipeline ranks; plan it "
            "for the job's figures"
        )
    rank_of = placement.stage_to_rank
    rounds = [rank_of[first : first + num_ranks] for first in range(0, placement.num_stages, num_ranks)]
    ends = rank_of[0], rank_of[-1]
    if any(sorted(row) != list(range(num_ranks)) for row in rounds) or not (
        ends[0] == ends[1] or ends == (0, num_ranks - 1)
    ):
        raise UserError(
            "training needs one of the first P stages on every rank, one of the next P, and so on, and the first and "
            f"the last stage on one rank or on the first and the last; got stages on ranks {list(rank_of)}; choose "
            "another placement"
        )


def check_runnable(schedule: Schedule, num_ranks: int, num_microbatches: int) -> None:
    """Refuse a schedule of another size than the job's, and what a plan could do and a Megatron model, or exact
    accumulation, cannot.

    Raises:
        UserError: the rule, the values and the remedy.
    """
    if schedule.num_ranks != num_ranks or schedule.num_microbatches != num_microbatches:
        raise UserError(
            f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks and {schedule.num_microbatches} "
            f"microbatches, but the job runs {num_ranks} pipeline ranks and {num_microbatches} microbatches "
            "(global batch / micro batch / data-parallel size); plan it for the job's figures"
        )
    if schedule.num_slices > 1:
        raise UserError(
            f"training needs a schedule of whole sequences; {schedule.name!r} has {schedule.num_slices} slices; plan "
            "one without"
        )
    placement = schedule.placement
    check_placement(placement, schedule.num_ranks)
    for stage, rank in enumerate(placement.stage_to_rank):
        row = [p for p in schedule.order[rank] if p.stage == stage]
        forward = [p.microbatch for p in row if p.kind is Kind.F]
        if forward != sorted(forward):
            raise UserError(
                f"forwards of a stage must come in the order of the microbatches, as its data do; {schedule.name!r} "
                f"runs stage {stage} in the order {forward}; sort them"
            )
        backward = [p.microbatch for p in row if p.kind in (Kind.B, Kind.BW)]
        weight = [p.microbatch for p in row if p.kind in (Kind.W, Kind.BW)]
        if weight != backward:
            early = next(w for w, b in zip(weight, backward, strict=True) if w != b)
            raise UserError(
                f"weight gradients must be accumulated in the order of the backwards, which keeps them exact and lets "
                f"data parallelism reduce them after the last; stage {stage} of {schedule.name!r} runs W of microbatch "
                f"{early} before that of an earlier backward; move it behind"
            )

"""Compatibility rules between a job and its schedule, for this package's training loop and for Megatron-LM jobs.

A table defines when each ``--zero-bubble-*`` flag has an effect; ``options.py`` has that of the Megatron options which
no schedule supports. Rules that depend on the schedule itself, such as its number of microbatches, are checked on the
schedule. All rules are checked before training starts.
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
from megatron.zero_bubble.job.options import check_options
from megatron.zero_bubble.job.runnable import check_runnable
from megatron.zero_bubble.job.shards import check_shards
from megatron.zero_bubble.job.slices import check_slices
from megatron.zero_bubble.plan.shard import check_chunks
from megatron.zero_bubble.planning.source import AUTO, ScheduleSource
from megatron.zero_bubble.schedules import has_units, sliced


@dataclass(frozen=True)
class Job:
    """The properties of a job that decide whether a flag has an effect.

    Attributes:
        options: the parsed ``--zero-bubble-*`` flags.
        under_launcher: whether Megatron-LM's own training loop runs.
        shows_stock_passes: whether the passes of Megatron's own 1F1B can be observed if no schedule is selected.
        train_iters: the last iteration of the run; None if it is not known yet.
    """

    options: argparse.Namespace
    under_launcher: bool = False
    shows_stock_passes: bool = False
    train_iters: int | None = None

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

    @property
    def first_recorded(self) -> int:
        """The first of the iterations that ``--zero-bubble-trace-iterations`` lists; 0 without the flag."""
        return min((some[0] for some in self.options.zero_bubble_trace_iterations or ()), default=0)


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
            or bool(job.options.zero_bubble_schedule_file)
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
        ("recompute-logits", "nccl-collective-ctas"),
        lambda job: vocabulary_algorithm(job.options) is not None,
        "has no effect without vocabulary parallelism; give --zero-bubble-vocabulary-parallel 2 or drop the flag",
    ),
    _Rule(
        ("placement",),
        lambda job: job.plans or bool(job.options.zero_bubble_schedule_file),
        "works only with --zero-bubble-schedule zb-auto, got {schedule}; drop the flag or choose zb-auto",
    ),
    _Rule(
        ("memory-limit",),
        lambda job: job.plans or has_units(job.options.zero_bubble_schedule),
        "works only with --zero-bubble-schedule zb-auto, and with zero-pp, whose units it limits, got {schedule}; drop "
        "the flag or choose one of the two",
    ),
    _Rule(
        ("costs",),
        lambda job: has_units(job.options.zero_bubble_schedule),
        "works only with --zero-bubble-schedule zero-pp, whose units are chosen by these costs, got {schedule}; drop "
        "the flag or choose zero-pp",
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
        ("trace-iterations",),
        lambda job: job.train_iters is None or job.first_recorded <= job.train_iters,
        "lists no iteration of the run, which begins with 1 and ends with {last}; list earlier ones, or raise "
        "--train-iters",
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
    for rule in _RULES:
        for flag in rule.flags:
            value = getattr(job.options, "zero_bubble_" + flag.replace("-", "_"))
            if value is not None and not rule.applies(job):
                text = rule.otherwise.format(schedule=job.schedule, last=job.train_iters)
                raise UserError(f"{_spelled(flag, value)} {text}")


def _spelled(flag: str, value: object) -> str:
    """The flag as the user gave it, with its value if that is a string."""
    if value is False:
        return f"--no-zero-bubble-{flag}"
    return f"--zero-bubble-{flag} {value}" if isinstance(value, str) else f"--zero-bubble-{flag}"


def check_costs_file(options: argparse.Namespace) -> None:
    """Raise UserError if ``--zero-bubble-record-costs`` names a folder, or the file from which units are chosen."""
    file = options.zero_bubble_record_costs
    if file and options.zero_bubble_costs and Path(file).resolve() == Path(options.zero_bubble_costs).resolve():
        raise UserError(
            "--zero-bubble-record-costs and --zero-bubble-costs must name different files, because a resumed run would "
            f"choose other units, and add gradients in another order; got {file} twice; name another file to record"
        )
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
    if options.zero_bubble_memory_limit or options.zero_bubble_costs:  # the units of any batch size may be too large
        for count in counts:
            source.make(count)
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

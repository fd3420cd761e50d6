"""Compatibility rules between a job and its schedule, for this package's training loop and for Megatron-LM jobs.

Three tables have rows of one type: ``effects.py`` says where each ``--zero-bubble-*`` flag has an effect,
``options.py`` what the options of Megatron must be, and ``planning/exclusions.py`` which choices exclude each other.
Rules that depend on the schedule itself, such as its number of microbatches, are checked on the schedule. All rules are
checked before training starts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Schedule, Slices
from megatron.zero_bubble.core.plan.shard import check_chunks
from megatron.zero_bubble.core.schedules import has_units
from megatron.zero_bubble.planning.exclusions import EXCLUSIONS, refuse_excluded
from megatron.zero_bubble.planning.job.balance import length_cost
from megatron.zero_bubble.planning.job.effects import EFFECTS
from megatron.zero_bubble.planning.job.flags import as_given, given
from megatron.zero_bubble.planning.job.options import OPTIONS, check_options, check_shards
from megatron.zero_bubble.planning.job.runnable import check_runnable
from megatron.zero_bubble.planning.rule import Reason, broken, check
from megatron.zero_bubble.planning.setup import Setup
from megatron.zero_bubble.planning.source import ScheduleSource
from megatron.zero_bubble.planning.values import values_of


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
    def facts(self) -> dict[str, Any]:
        """What the rules of ``effects.py`` ask about the job itself."""
        return {
            "under_launcher": self.under_launcher,
            "shows_stock_passes": self.shows_stock_passes,
            "train_iters": self.train_iters,
            "first_recorded": min((some[0] for some in self.options.zero_bubble_trace_iterations or ()), default=0),
        }


def check_flags(job: Job) -> None:
    """Reject flags that have no effect in this job, and flags that exclude each other.

    Raises:
        UserError: the rule, the given value and the remedy.
    """
    choices = given(job.options)
    check(EFFECTS, choices | job.facts, spell=as_given)
    refuse_excluded(choices, spell=as_given)


def refused(setup: Setup, job: Job | None = None) -> Reason | None:
    """Why a setup is refused; None if nothing excludes it. ``Reason.sentence`` says it in the words of a reader.

    Args:
        job: its observations count too; None for a setup alone.
    """
    choices = values_of(setup) if job is None else given(job.options) | values_of(setup)
    return broken((*EFFECTS, *EXCLUSIONS), choices | ({} if job is None else job.facts))


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
        check(OPTIONS, {"balance_microbatches": True}, job)
        length_cost(options, job, None)
    if has_units(source.name):  # those of any batch size may be too large for the memory limit
        for count in counts:
            source.make(count)
    check_optimizer(options, job)
    check_slices(source.slices, options.zero_bubble_slice_ends, job)
    if options.zero_bubble_shard_weights:
        check_shards(job)
        check_chunks(source.placement)
    more = {"vocabulary": source.vocabulary is not None, "pairs": source.overlaps}
    check_options(job, num_slices=len(source.slices), **more, choices=given(options))
    if options.zero_bubble_record_costs and any(source.make(count).fused for count in counts):
        raise UserError(
            "--zero-bubble-record-costs needs a schedule that splits every backward into B and W, got "
            f"{source.name}; give --zero-bubble-schedule zb-h1"
        )


def check_optimizer(options: argparse.Namespace, job: Any) -> None:
    """Reject an optimizer whose steps post-validation cannot delay or undo.

    Args:
        job: the job's flags.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    name = getattr(job, "optimizer", None)
    if not options.zero_bubble_post_validation or name in (None, "adam"):
        return
    if name != "sgd" and (name == "dist_muon" or getattr(job, "use_distributed_optimizer", False)):
        raise UserError(
            "post-validation does not support the optimizers that divide their steps by layers, because these reduce "
            f"the norm and gather weights over all ranks; got --optimizer {name}; give --optimizer adam, or drop "
            "--zero-bubble-post-validation"
        )
    if options.zero_bubble_rollback == "inverse":
        raise UserError(
            f"--zero-bubble-post-validation inverse inverts only the update of Adam; got --optimizer {name}; give "
            "--zero-bubble-post-validation exact, or --optimizer adam"
        )


def check_slices(slices: Slices, ends: Sequence[int] | None, job: Any) -> None:
    """Check that the job's sequences can be cut into ``slices``.

    Args:
        ends: the ends of the slices that the user gave, if any.
        job: the job's flags.

    Raises:
        UserError: ends that belong to sequences of another length, or sequences with too few tokens.
    """
    if len(slices) == 1:
        return
    length = job.seq_length
    if ends is not None and ends[-1] != length:
        raise UserError(
            f"the last end of the slices must be the length of the sequences, --seq-length {length}; got "
            f"--zero-bubble-slices {','.join(map(str, ends))}; give {length} as the last end"
        )
    multiple = job.tensor_model_parallel_size if job.sequence_parallel else 1
    tokens = slices.in_tokens(length, multiple)
    if ends is not None and tokens != tuple(ends):
        raise UserError(
            "with sequence parallelism, every slice must end at a multiple of the tensor-parallel size "
            f"{multiple}; got --zero-bubble-slices {','.join(map(str, ends))}; give for example "
            f"{','.join(map(str, tokens))}"
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

"""Compatibility rules between a job and its schedule, for this package's training loop and for Megatron-LM jobs.

Two files have tables of rules: ``effects.py`` says where each ``--zero-bubble-*`` flag has an effect, and
``planning/exclusions.py`` which choices exclude each other, and what the options of Megatron must be. Rules that depend
on the schedule itself, such as its number of microbatches, are checked on the schedule. All rules are checked before
training starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.schedules import has_units
from megatron.zero_bubble.planning.cuts import check_cuts
from megatron.zero_bubble.planning.job.balance import length_cost
from megatron.zero_bubble.planning.job.effects import Job, check_effects
from megatron.zero_bubble.planning.job.flags import as_given
from megatron.zero_bubble.planning.job.options import check_options
from megatron.zero_bubble.planning.job.runnable import check_runnable, is_megatrons_own
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Given, Named, Synchronous, Validated
from megatron.zero_bubble.planning.source import ScheduleSource
from megatron.zero_bubble.planning.values import BALANCE


def check_job(job: Job) -> None:
    """Reject observations, and balanced microbatches, that have no effect in this job.

    Raises:
        UserError: the rule, the given value and the remedy.
    """
    run = job.run
    balance = {} if run.balance is None else {BALANCE: True}
    observed = {name: value for name, value in vars(run.observations).items() if value}
    check_effects(observed | balance, job, as_given)


def check_costs_file(run: RunOptions) -> None:
    """Raise UserError if ``--zero-bubble-record-costs`` names a folder, or the file from which units are chosen."""
    file, order = run.observations.record_costs, run.setup.order
    costs = order.costs if isinstance(order, Named) else None
    if file and costs and Path(file).resolve() == Path(costs).resolve():
        raise UserError(
            "--zero-bubble-record-costs and --zero-bubble-costs must name different files, because a resumed run would "
            f"choose other units, and add gradients in another order; got {file} twice; name another file to record"
        )
    if file and Path(file).is_dir():
        raise UserError(f"--zero-bubble-record-costs needs a file, got the folder {file}; name a file")


def check_schedule(
    run: RunOptions, source: ScheduleSource, num_ranks: int, num_microbatches: Sequence[int], job: Any
) -> None:
    """Reject a schedule that does not fit the job's batch sizes, its sequences or the requested measurements.

    Args:
        job: the job's flags; those of its sequences are read, and those that slices do not support.
        num_microbatches: microbatches per data-parallel rank, of every training and evaluation batch size of the job.

    Raises:
        UserError: the rule, the values and the remedy.
    """
    counts = sorted(set(num_microbatches))
    setup = run.setup
    if isinstance(setup.order, Given):
        _check_file(source.make(counts[0]), num_ranks, counts)
    if run.balance is not None:
        length_cost(run.balance, job, None)
    if has_units(source.name):  # those of any batch size may be too large for the memory limit
        for count in counts:
            source.make(count)
    check_optimizer(setup.step, job)
    running = setup.running(source.setup)
    check_cuts(running.cuts, setup.cuts, job)
    check_options(job, replace(run, setup=running), is_megatrons_own(source.placement))
    setup.check_placement(source.placement)
    if run.observations.record_costs and any(source.make(count).fused for count in counts):
        raise UserError(
            "--zero-bubble-record-costs needs a schedule that splits every backward into B and W, got "
            f"{source.name}; give --zero-bubble-schedule zb-h1"
        )


def check_optimizer(step: Synchronous | Validated, job: Any) -> None:
    """Reject an optimizer whose steps post-validation cannot delay or undo.

    Args:
        job: the job's flags.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    name = getattr(job, "optimizer", None)
    if not isinstance(step, Validated) or name in (None, "adam"):
        return
    if name != "sgd" and (name == "dist_muon" or getattr(job, "use_distributed_optimizer", False)):
        raise UserError(
            "post-validation does not support the optimizers that divide their steps by layers, because these reduce "
            f"the norm and gather weights over all ranks; got --optimizer {name}; give --optimizer adam, or drop "
            "--zero-bubble-post-validation"
        )
    if step.rollback == "inverse":
        raise UserError(
            f"--zero-bubble-post-validation inverse inverts only the update of Adam; got --optimizer {name}; give "
            "--zero-bubble-post-validation exact, or --optimizer adam"
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

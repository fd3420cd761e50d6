"""Where each of our flags means something: one table for the training loop of this package and for a Megatron-LM job.

A flag that would be ignored is refused before anything starts. What depends on the schedule itself, on its batch sizes
and on its unsplit backwards, is asked of the schedule.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.zero_bubble.formats.plan import read_schedule_file
from megatron.zero_bubble.ir import Schedule
from megatron.zero_bubble.job.config import AUTO, ZeroBubbleConfig, check_runnable
from megatron.zero_bubble.job.flags import FlagError, has_schedule, records
from megatron.zero_bubble.schedules import build


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
        "needs a training loop that hears of steps that are undone, which Megatron-LM's is not; drop it here, or train "
        "with scripts/pretrain_gpt.py of this package",
    ),
    _Rule(
        ("post-validation",),
        lambda job: job.has_schedule,
        "needs a zero-bubble schedule, whose passes validate a step, got none; give --zero-bubble-schedule zb-h2",
    ),
    _Rule(
        ("exact", "fuse-wgrad", "wgrad-stream"),
        lambda job: job.has_schedule,
        "says how a zero-bubble schedule computes weight gradients, got no schedule; give --zero-bubble-schedule zb-h1 "
        "or drop the flag",
    ),
    _Rule(
        ("placement", "memory-limit"),
        lambda job: job.plans,
        "is for --zero-bubble-schedule zb-auto, any other schedule has its own, got {schedule}; drop the flag or "
        "choose zb-auto",
    ),
    _Rule(
        ("rollback",),
        lambda job: bool(job.options.zero_bubble_post_validation),
        "says how --zero-bubble-post-validation undoes a wrong step, which is not given; add it or drop the flag",
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
        "says which iterations to record, got nowhere to write them; give --zero-bubble-trace DIR",
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
        FlagError: the rule, what was given and the remedy.
    """
    if job.options.zero_bubble_schedule and job.options.zero_bubble_schedule_file:
        raise FlagError("--zero-bubble-schedule and --zero-bubble-schedule-file exclude each other; keep one")
    for rule in _RULES:
        for flag in rule.flags:
            value = getattr(job.options, "zero_bubble_" + flag.replace("-", "_"))
            if value is not None and not rule.applies(job):
                raise FlagError(f"{_spelled(flag, value)} {rule.otherwise.format(schedule=job.schedule)}")


def _spelled(flag: str, value: object) -> str:
    """A flag and its value as given, as far as it is one word."""
    if value is False:
        return f"--no-zero-bubble-{flag}"
    return f"--zero-bubble-{flag} {value}" if isinstance(value, str) else f"--zero-bubble-{flag}"


def check_costs_file(options: argparse.Namespace) -> None:
    """Raises FlagError where costs cannot be written because a folder is in the way."""
    file = options.zero_bubble_record_costs
    if file and Path(file).is_dir():
        raise FlagError(f"--zero-bubble-record-costs needs a file, got the folder {file}; name a file")


def check_schedule(
    options: argparse.Namespace, config: ZeroBubbleConfig, num_ranks: int, num_microbatches: Sequence[int]
) -> None:
    """Refuse a schedule that does not fit the iterations and evaluations of the job, or what is measured of it.

    Args:
        num_microbatches: every number of microbatches that the job has, of a data-parallel rank.

    Raises:
        FlagError: the rule, the values and the remedy.
        ValueError: a schedule file that cannot run in this job.
    """
    if config.schedule == AUTO:
        return  # made for each number of microbatches, with every backward split
    counts = sorted(set(num_microbatches))
    if config.schedule_file is not None:
        schedules = [_from_file(config.schedule_file, num_ranks, counts)]
    elif options.zero_bubble_record_costs:
        assert config.schedule is not None, "one of the two is given"
        sizes = [{"num_ranks": num_ranks, "num_microbatches": count} for count in counts]
        schedules = [build(config.schedule, **size, num_chunks=config.num_chunks) for size in sizes]
    else:
        return
    if options.zero_bubble_record_costs and any(schedule.fused for schedule in schedules):
        raise FlagError(
            "--zero-bubble-record-costs needs a schedule that splits every backward into B and W, got "
            f"{config.schedule or config.schedule_file}; give --zero-bubble-schedule zb-h1"
        )


def _from_file(file: str, num_ranks: int, counts: list[int]) -> Schedule:
    schedule = read_schedule_file(file)
    if len(counts) > 1:
        raise FlagError(
            f"a schedule file is for one number of microbatches, this one for {schedule.num_microbatches}, got a job "
            f"that runs {', '.join(map(str, counts[:-1]))} and {counts[-1]} as its batch grows or is evaluated; give "
            "--zero-bubble-schedule NAME, which fits all of them, or one batch size"
        )
    check_runnable(schedule, num_ranks, counts[0])
    return schedule

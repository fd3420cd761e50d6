"""The job that the playground starts from: its costs and sizes in place of the sliders' values, and its own schedule.

They come from a costs file, from a model's configuration, or from the flags of a job, as in ``advise``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megatron.zero_bubble.cli.advice_text import given_of
from megatron.zero_bubble.cli.advise import flags_of_job
from megatron.zero_bubble.cli.figures import figures
from megatron.zero_bubble.cli.job_as_is import add_job_flags, capacity_of, paced, read_job
from megatron.zero_bubble.cli.job_schedule import planned_schedule
from megatron.zero_bubble.cli.job_words import add_job_words
from megatron.zero_bubble.cli.plan import add_plan
from megatron.zero_bubble.cli.winner import FILE, flags_of_name, has_name, run_text
from megatron.zero_bubble.core.costs.terms import TIMES
from megatron.zero_bubble.core.errors import UserError, as_flag
from megatron.zero_bubble.core.ir import Placement, Schedule
from megatron.zero_bubble.core.ir.sizes import check_size
from megatron.zero_bubble.core.search.placements import name_of
from megatron.zero_bubble.planning.answer import Answer
from megatron.zero_bubble.planning.codecs import StrictParser
from megatron.zero_bubble.planning.figures import Figures, measured
from megatron.zero_bubble.planning.job.changes import stage_flags
from megatron.zero_bubble.planning.question import Question

_SCHEDULE = "--zero-bubble-schedule"
_GIB = 2**30


@dataclass(frozen=True)
class PageJob:
    """What a page starts from.

    Attributes:
        source: where the costs come from, as the page says it.
        costs: costs, pipeline ranks and microbatches.
        words: the flags of ``zero-bubble plan`` that give these costs; None if none do.
        flags: the flags of the job.
        own: its schedule; None if it is not known.
        make: makes its schedule for a number of microbatches.
        limit_gib: memory for activations, in GiB; None if it is not known.
    """

    source: str
    costs: Figures
    words: tuple[str, ...] | None = None
    flags: tuple[str, ...] = ()
    own: Schedule | None = None
    make: Callable[[int], Schedule] | None = None
    limit_gib: float | None = None

    def with_microbatches(self, count: int) -> Figures:
        """Return the costs with another number of microbatches."""
        return replace(self.costs, num_microbatches=count)

    def content(self) -> dict[str, Any]:
        """Return what the page shows of it."""
        ranks, own = self.costs.num_ranks, self.own
        passes, memory = self.costs.on(Placement.linear(ranks))
        gib = [kept / _GIB for kept in memory.activation] if self.costs.in_bytes else None
        links = {passes.comm(at, at + 1) for at in range(ranks - 1)}
        return {
            "source": self.source,
            "num_ranks": ranks,
            "num_microbatches": self.costs.num_microbatches,
            "times": {name: getattr(passes, name) for name in TIMES},
            "comm_ms": [min(links, default=0.0), max(links, default=0.0)],
            "activation_gib": gib,
            "notes": self.costs.notes,
            "limit_gib": self.limit_gib,
            "own": None if own is None else own.name,
            "same": None if own is None else _row_of(own),
        }

    def how_to_run(self, asked: Question, made: Answer) -> str:
        """Return the sentence that says how the job runs a plan."""
        if self.own is not None and asked.schedule is None:
            return "It is the job's own schedule: add nothing."
        schedule = made.timeline.schedule
        needed = made.costs.needed_layout(schedule.placement)
        flags = flags_of_name(asked) if has_name(asked, schedule, needed) else None
        text = run_text(flags, f"save the plan as {FILE}")
        out = given_of(self._drops(schedule.placement, named=bool(flags)), self.flags)
        return f"{text.removesuffix('.')}; leave out {' '.join(out)}" if out else text

    def _drops(self, placement: Placement, *, named: bool) -> tuple[str, ...]:
        """The flags that contradict a plan on this placement, whose schedule a flag names or not."""
        own = placement if self.own is None else self.own.placement
        stages = () if placement == own else stage_flags(own, placement)
        return stages if named else (*stages, _SCHEDULE)


def add_job(verb: argparse.ArgumentParser) -> None:
    """Add the flags that give a job."""
    verb.add_argument(
        "--config",
        metavar="FILE",
        help="start from estimates for a model's training configuration (see configs/), for --gpu",
    )
    add_job_flags(verb)
    verb.add_argument(
        "--num-ranks",
        type=int,
        metavar="P",
        help="pipeline ranks, with --costs or --config (default: the stages of the costs file, or the configuration's)",
    )
    add_job_words(verb)


def job_of(options: argparse.Namespace) -> PageJob | None:
    """Return the job that the flags of ``add_job`` give; None without one.

    Raises:
        UserError: for files and flags that contradict each other or cannot be read, or a job that could not run.
    """
    argv = flags_of_job(options)
    if argv:
        for name in ("config", "num_ranks"):
            if getattr(options, name) is not None:
                raise UserError(f"{as_flag(name)} does not apply to a job's own flags after --; leave one of them out")
        return _of_flags(options, argv)
    _refuse_cluster(options)
    if options.config is not None and options.costs is not None:
        raise UserError("--config and --costs both give the costs; leave one of them out")
    if options.config is not None:
        given = () if options.num_ranks is None else ("--num-ranks", str(options.num_ranks))
        return _of_plan(options.config, ("--config", options.config, "--gpu", options.gpu, *given))
    if options.costs is not None:
        read, path = options.costs.file, options.costs.path
        ranks = options.num_ranks if options.num_ranks is not None else read.num_stages
        if ranks is None:
            raise UserError(f"{path} is for any number of ranks; give it with --num-ranks")
        words = ("--costs", path, "--num-ranks", str(ranks))
        check_size(ranks, 2 * ranks)
        return PageJob(path, measured(read, ranks, 2 * ranks), words)
    if options.num_ranks is not None:
        raise UserError("--num-ranks applies only to --costs and --config; without them a slider sets it; leave it out")
    return None


def _refuse_cluster(options: argparse.Namespace) -> None:
    """Refuse flags that only a job's own flags need."""
    parser = StrictParser()
    add_job_flags(parser)
    for action in parser._actions:
        if action.dest not in ("help", "costs", "gpu") and getattr(options, action.dest) != action.default:
            raise UserError(
                f"{action.option_strings[0]} applies only to the flags of a job after --; give them, or leave it out"
            )


def _of_plan(file: str, words: tuple[str, ...]) -> PageJob:
    parser = StrictParser(prog="zero-bubble plan")
    add_plan(parser)
    return PageJob(file, figures(parser.parse_args(["--schedule", "1f1b", *words])), words)


def _of_flags(options: argparse.Namespace, argv: Sequence[str]) -> PageJob:
    read = read_job(paced(options, argv), argv)
    args, costs, own = read.read.args, read.today.costs, read.today.timeline.schedule
    capacity = capacity_of(options, read.today)
    limit = None
    if capacity is not None:
        need = read.today.need
        others = max(map(sum, zip(need.weights, need.messages, strict=True)))
        limit = math.ceil(max(capacity - others, *need.activations) / _GIB * 100) / 100
    made = cache(lambda count: planned_schedule(args, costs, count))
    return PageJob("the flags after --", costs, None, tuple(argv), own, made, limit)


def _row_of(schedule: Schedule) -> str:
    """The name of the schedule in the page's table."""
    placement = schedule.placement
    stages = placement.num_stages // placement.num_ranks
    return f"{schedule.name} x{stages}" if name_of(placement) == "loop" else schedule.name

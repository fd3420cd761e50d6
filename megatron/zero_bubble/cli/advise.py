"""``zero-bubble advise``: what a job gains from this package, whether it fits, and the flags to add."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatron.zero_bubble.cli.advice_text import content_of, text_of, text_of_job
from megatron.zero_bubble.cli.assumed_vocabulary import OtherVocabSize, with_others
from megatron.zero_bubble.cli.gpu_memory import beyond
from megatron.zero_bubble.cli.hardware import device_of
from megatron.zero_bubble.cli.job_as_is import JobAsIs, add_job_flags, capacity_of, paced, read_job
from megatron.zero_bubble.cli.job_figures import assumes_vocab_size
from megatron.zero_bubble.cli.job_runs import SEVERAL, job_runs, with_more_queues
from megatron.zero_bubble.cli.job_variants import VARIANTS, SizeVariant, chosen_variants
from megatron.zero_bubble.cli.job_words import add_job_words, job_words
from megatron.zero_bubble.cli.links import bandwidth_to_replicas
from megatron.zero_bubble.cli.megatron_job import ParsedJob
from megatron.zero_bubble.cli.plan_text import SLOW
from megatron.zero_bubble.cli.planned_job import planned_job
from megatron.zero_bubble.cli.progress import working
from megatron.zero_bubble.core.costs.units import positive_figure
from megatron.zero_bubble.core.errors import Refusal, Remedy, UserError
from megatron.zero_bubble.core.formats.layout_string import FLAG as LAYOUT_FLAG
from megatron.zero_bubble.core.ir.garbage import without_gc
from megatron.zero_bubble.core.search.loops import compiled
from megatron.zero_bubble.engine.runtime.backends import QUEUES
from megatron.zero_bubble.planning.advice import Adviser, StartedWith, Tried
from megatron.zero_bubble.planning.change import NUMBERS, AdviceRow, Change, Today
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.idle import idle_of
from megatron.zero_bubble.planning.job.changes import JobChanges
from megatron.zero_bubble.planning.job.overlaps import enabled_overlaps, switched_off
from megatron.zero_bubble.planning.job.pattern import pattern_in, pattern_of
from megatron.zero_bubble.planning.plan_file import written
from megatron.zero_bubble.planning.remedies import remedied
from megatron.zero_bubble.planning.score import DroppedVariant, attempt
from megatron.zero_bubble.planning.setup import Setup
from megatron.zero_bubble.planning.worth import WORTH, WORTH_ESTIMATED, Advice

_MOST_SEARCHED = 60_000
"""Passes of searched plans after which searches are left out."""
_MOST_REMEDIES = 4
"""Options that a change does without, at most."""
_EFFORT = 0.1
"""Effort of a search, so that there is time for more of them."""
_HOST_GB_PER_S = 20.0
"""Copies between a GPU and its host where no bandwidth is given: PCIe 4 or better, shared by no more than two GPUs."""


def add_advise(verb: argparse.ArgumentParser) -> None:
    """Add the flags of ``advise``; the flags of the job follow after ``--``."""
    verb.usage = "%(prog)s [OPTION ...] -- FLAGS"
    verb.description = (
        "Say what a Megatron-LM job gains from this package: plan the job as it is, search for what is faster within "
        "the memory of its GPUs, and print the flags to add. It starts nothing, and needs neither torch nor a GPU."
    )
    add_job_flags(verb)
    verb.add_argument(
        "--memory-limit",
        metavar="LIMIT",
        help="limit of activation memory per rank, such as 1p (1F1B's peak) or 40GiB (default: what the GPU has left)",
    )
    verb.add_argument(
        "--host-bandwidth",
        type=float,
        default=_HOST_GB_PER_S,
        metavar="GB/S",
        help=f"bandwidth between a GPU and its host in one direction, for offloading (default: {_HOST_GB_PER_S:g})",
    )
    verb.add_argument(
        "--write", metavar="FILE", help="write the plan of a row; a job runs it with --zero-bubble-schedule FILE"
    )
    verb.add_argument(
        "--row", type=int, default=None, metavar="N", help="the row to write (default: the advised one, else the first)"
    )
    verb.add_argument(
        "--may-change",
        metavar="LIST",
        help=f"what else of the job may change, separated by commas: {', '.join(VARIANTS)} (default: nothing)",
    )
    verb.add_argument(
        "--quick",
        action="store_true",
        help="plan only schedules by name, without searches, within some seconds",
    )
    verb.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")
    add_job_words(verb)
    verb.set_defaults(
        command=advise,
        most_searched=_MOST_SEARCHED,
        effort=_EFFORT,
        environment={QUEUES: "1"},  # as scripts for Megatron-LM set it, whatever holds where this runs
        tries=True,
        drops_overlaps=True,
        remedies=False,
        files=True,
    )


class Advised(NamedTuple):
    """Advice for a job.

    Attributes:
        job: the job as it is.
        limit: what a plan may take, as in ``JobChanges``.
        plan: plans other changes of the job.
    """

    job: JobAsIs
    advice: Advice
    limit: float
    plan: Callable[[Iterable[Change | DroppedVariant]], Advice]


@without_gc()
def advise(options: argparse.Namespace) -> str:
    """Plan, and format the advice.

    Raises:
        UserError: the error that the job itself would stop with, a job without a pipeline, or bad options.
    """
    argv = flags_of_job(options)
    if not argv:
        raise UserError("advice is about the flags of a job, which come last, after a separate --; got none; give them")
    options = paced(options, argv)
    asked = advised(options, argv, _print if options.format == "text" else lambda *_: None)
    own, found = asked.job, asked.advice
    if options.write is not None:
        _write(options, found)
    others, now, unread = _with_other_vocab_sizes(options, argv, own, found), own.parsed.setup, own.read.unread
    behind = remedied(found, partial(_with_remedy, options, argv, asked))
    if options.format == "json":
        content = content_of(found, own.batch, now, argv, unread, behind)
        return json.dumps({**content, "other_vocabularies": [each._asdict() for each in others]}, indent=2) + "\n"
    return text_of(found, now, argv, unread, behind, others)


def _print(own: JobAsIs, capacity: float | None) -> None:
    print(text_of_job(own.today, own.batch, capacity), flush=True)


@without_gc()
def advised(
    options: argparse.Namespace,
    argv: Sequence[str],
    begin: Callable[[JobAsIs, float | None], None] = lambda *_: None,
) -> Advised:
    """Plan a job and its changes.

    Args:
        options: the flags of ``advise``, which are parsed, or set by a program (``defaults``).
        argv: the flags of the job.
        begin: is called with the job as it is, and what a plan may take, before its changes are planned.

    Raises:
        UserError: as ``advise``.
    """
    positive_figure("--host-bandwidth", options.host_bandwidth)
    own = read_job(options, argv)
    costs = own.costs
    capacity = capacity_of(options, own.today)
    limit = capacity if capacity is not None else max(costs.limit("1p"), *own.today.need.activations)
    bandwidth = options.host_bandwidth * 1e6
    most = math.inf if options.memory_limit is None else costs.limit(options.memory_limit)
    pipeline = JobChanges(
        own.today.timeline.schedule.placement,
        costs,
        limit,
        bandwidth,
        most,
        options.effort,
        (own.replicas, bandwidth_to_replicas(own.groups, device_of(options))),
        own.parsed.setup,
        pattern_of(own.parsed.args),
        options.files,
    )
    worth = WORTH if options.costs else WORTH_ESTIMATED

    overlaps = enabled_overlaps(own.read.args)

    def refused(change: Change, setup: Setup) -> Refusal | None:
        if overlaps and change.is_ours and not options.drops_overlaps:
            return Refusal(f"{switched_off(overlaps)}, and what they hide is in no figure")
        return own.parsed.refused(setup, change.adds, change.drops)

    variants = tuple(chosen_variants(options.may_change, own.read.args, options.costs))

    def changes() -> Iterator[Change | DroppedVariant]:
        planned = pipeline.named_changes() if options.quick else pipeline.changes()
        yield from map(partial(_with_its_remedies, own.parsed), planned) if options.remedies else planned
        for variant in variants:
            yield from attempt(variant.name, partial(_changes_of, variant, options, argv, limit))

    own = own.noting(_without(overlaps)) if overlaps else own
    if capacity is not None and (too_large := beyond(options, own.today.need)) is not None:
        own = own.noting(too_large)
    own = own if options.quick or compiled() else own.noting(f"Planned{SLOW}.")
    begin(own, capacity)

    def plan(asked: Iterable[Change | DroppedVariant]) -> Advice:
        with working("planning") as tell:
            adviser = Adviser(
                own.today,
                own.objective,
                capacity,
                refused,
                worth,
                options.most_searched,
                lambda name: tell(f"planning {name}"),
                most,
                _settings(own.read.args, options),
                partial(_tried, options, own.parsed) if options.tries else None,
                is_quick=options.quick and options.tries,
            )
            return adviser.advise(asked)

    found = Advice(own.today, (), own.objective, worth) if _is_full(own, worth) else plan(changes())
    return Advised(own, found, limit, plan)


def defaults() -> argparse.Namespace:
    """The options of ``advise`` where no flag is given."""
    parser = argparse.ArgumentParser(add_help=False)
    add_advise(parser)
    return parser.parse_args([])


def _with_other_vocab_sizes(
    options: argparse.Namespace, argv: Sequence[str], own: JobAsIs, found: Advice
) -> tuple[OtherVocabSize, ...]:
    """The advice with other vocabularies, where the job does not say which it has."""

    def job(size: int) -> tuple[Today, Figures]:
        other = read_job(options, changed(argv, ["--vocab-size", str(size)], ()))
        return other.today, other.costs

    if not assumes_vocab_size(own.read.args, options.costs):
        return ()
    return with_others(job, found.best, own.objective)


def _without(overlaps: Sequence[str]) -> str:
    """What a job has to do without under a schedule of this package."""
    return f"Under a schedule of this package, {switched_off(overlaps)}; what they hide is in no figure."


def _settings(args: argparse.Namespace, options: argparse.Namespace) -> tuple[StartedWith, ...]:
    """What the job can be started with: its own environment, then, where it may, one with more hardware queues."""
    runs = replace(job_runs(args, options.gpu, True, options.environment), moved=0.0, host_memory=None)
    more = with_more_queues(runs)
    return (StartedWith(runs), *(() if more is None else (StartedWith(more, (SEVERAL,)),)))


def _tried(options: argparse.Namespace, parsed: ParsedJob, row: AdviceRow) -> Tried:
    """Plan and prove the job with a row's change, as its dry run does."""
    job = parsed.changed(row.setup, row.change.adds, row.change.drops)
    given = dict(each.split("=", 1) for each in row.environment)
    planned = planned_job(options, job.args, True, {**options.environment, **given}, options.quick)
    return Tried(planned.timeline, planned.need, planned.answer)


def flags_of_job(options: argparse.Namespace) -> list[str]:
    """Return the flags of the job, with those of ``--config FILE`` of our loop in the place of it.

    Raises:
        UserError: no flags, or an unreadable or invalid configuration file.
    """
    from megatron.zero_bubble.planning.job.arguments.parser import expanded

    return expanded(job_words(options))


def _changes_of(
    variant: SizeVariant, options: argparse.Namespace, argv: Sequence[str], limit: float
) -> Iterator[Change]:
    """The changes of a job with other sizes."""
    flags, pattern = variant.flags, pattern_in(argv)
    if pattern is not None and LAYOUT_FLAG in variant.drops:
        flags = (*flags, pattern.flag, pattern.laid_out(None))
    other = read_job(options, changed(argv, flags, variant.drops))
    for change in _pipeline_of(other, options, limit).quick_changes(other.today.timeline.schedule):
        numbers = max(variant.numbers, change.numbers, key=list(NUMBERS).index)
        change = replace(change, name=f"{variant.name}, {change.name}", numbers=numbers, reorders=False)
        yield _with_flags(change, variant.flags, variant.drops)


@without_gc()
def _with_remedy(
    options: argparse.Namespace, argv: Sequence[str], asked: Advised, remedy: Remedy, names: Collection[str]
) -> Advice:
    """Advice on the changes with these names, of a job with a remedy for what refuses them."""

    def changes() -> Iterator[Change]:
        other = read_job(options, changed(argv, remedy.adds, remedy.drops))
        pipeline = replace(_pipeline_of(other, options, asked.limit), effort=options.effort)
        for change in pipeline.named_changes() if options.quick else pipeline.changes():
            if change.name in names:
                yield _with_flags(change, remedy.adds, remedy.drops)

    return asked.plan(attempt("the remedy", changes))


def _pipeline_of(job: JobAsIs, options: argparse.Namespace, limit: float) -> JobChanges:
    """The changes of another job on the same GPUs."""
    placement, bandwidth = job.today.timeline.schedule.placement, options.host_bandwidth * 1e6
    return JobChanges(
        placement, job.costs, limit, bandwidth, setup=job.parsed.setup, pattern=pattern_of(job.parsed.args)
    )


def _with_flags(change: Change, adds: Sequence[str], drops: Sequence[str]) -> Change:
    """A change of a job with other flags too."""
    dropped = tuple(dict.fromkeys((*drops, *change.drops)))
    return replace(change, adds=(*adds, *change.adds), drops=dropped)


def _with_its_remedies(parsed: ParsedJob, change: Change) -> Change:
    """A change with the flags without which the job would refuse it, as far as they are known."""
    for _ in range(_MOST_REMEDIES):
        refused = parsed.refused(change.setup, change.adds, change.drops)
        if refused is None or refused.remedy is None:
            break
        change = _with_flags(change, refused.remedy.adds, refused.remedy.drops)
    return change


def _is_full(job: JobAsIs, worth: float) -> bool:
    """Whether no order, layout or division can gain enough, because all ranks work nearly all the time."""
    timeline, costs, _ = job.today
    passes = costs.on(timeline.schedule.placement)[0]
    if passes.has_all_to_alls and not timeline.schedule.overlaps:
        return False  # their all-to-alls count as work
    idle = idle_of(timeline, passes)
    return idle.total < worth * timeline.makespan_ms


def changed(argv: Sequence[str], flags: Sequence[str], drops: Sequence[str]) -> list[str]:
    """Return the flags of a job without some, with their values, and with others at the end."""
    left: list[str] = []
    is_dropped = False
    for word in argv:
        if word.startswith("--"):
            is_dropped = word.partition("=")[0] in (*drops, *(flag for flag in flags if flag.startswith("--")))
        if not is_dropped:
            left.append(word)
    return [*left, *flags]


def _write(options: argparse.Namespace, found: Advice) -> None:
    rows = found.rows
    if not rows:
        raise UserError(f"--write needs a row to write; got none for {options.write}; leave it out")
    if options.row is not None and not 1 <= options.row <= len(rows):
        raise UserError(f"--row must be from 1 to {len(rows)}; got {options.row}")
    row = rows[options.row - 1] if options.row is not None else found.best or rows[0]
    try:
        Path(options.write).write_text(written(row.plan), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{options.write} cannot be written: {error.strerror}; give another file") from error

"""``zero-bubble advise``: what a job gains from this package, whether it fits, and the flags to add."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatron.zero_bubble.cli.advice_text import Batch, content_of, text_of, text_of_job
from megatron.zero_bubble.cli.assumed_vocabulary import OtherVocabulary, with_others
from megatron.zero_bubble.cli.job_figures import CostsInput, assumes_vocabulary, gpu_bytes, job_figures, with_vocabulary
from megatron.zero_bubble.cli.job_runs import SEVERAL, job_runs, with_more_queues
from megatron.zero_bubble.cli.job_schedule import planned_schedule
from megatron.zero_bubble.cli.job_variants import VARIANTS, Variant, chosen_variants
from megatron.zero_bubble.cli.job_words import job_words
from megatron.zero_bubble.cli.links import add_link_flags, bandwidth_to_replicas, given_links, links_of, with_transfers
from megatron.zero_bubble.cli.machine import ASSUMED
from megatron.zero_bubble.cli.megatron_job import MegatronJob, checked_megatron_job
from megatron.zero_bubble.cli.planned_job import planned_job
from megatron.zero_bubble.cli.progress import working
from megatron.zero_bubble.cli.rank_groups import RankGroups, checked_world_size
from megatron.zero_bubble.core.analysis.idle import idle_of
from megatron.zero_bubble.core.analysis.score import ROUNDING
from megatron.zero_bubble.core.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.core.costs.estimate import DEVICES
from megatron.zero_bubble.core.costs.units import format_bytes, positive_figure
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout import job_layers
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.integration.megatron_lm.checks import overlaps_of
from megatron.zero_bubble.planning.advice import WORTH, WORTH_ESTIMATED, Advice, Adviser, Setting, Tried
from megatron.zero_bubble.planning.change import NUMBERS, Change, Need, Row, Today, need_of
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.job.changes import Pipeline
from megatron.zero_bubble.planning.job.flags import has_schedule
from megatron.zero_bubble.planning.job.options import check_pairs
from megatron.zero_bubble.planning.job.overlaps import disabled, enabled_overlaps
from megatron.zero_bubble.planning.plan_file import written
from megatron.zero_bubble.planning.score import DroppedVariant, attempt

_MEMORY = {"a100": "80GiB", "h100": "80GiB", "h200": "141GiB", "b200": "180GiB"}
"""Memory of a GPU where none is given."""
_RESERVED = 0.1
"""The share of a GPU's memory that is left for CUDA, NCCL and fragmentation."""
_SECONDS = 24.0
"""CPU time after which searches are left out."""
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
        command=advise, seconds=_SECONDS, effort=_EFFORT, environment=os.environ, tries=True, remedies=True
    )


def add_job_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags that say where a job runs, and what it costs there."""
    verb.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    verb.add_argument("--gpus-per-node", type=int, default=8, metavar="G", help="GPUs per node (default: 8)")
    verb.add_argument(
        "--gpu",
        type=str.lower,
        choices=tuple(DEVICES),
        default=ASSUMED,
        help=f"GPU to estimate for (default: {ASSUMED})",
    )
    verb.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="memory of a GPU, of which a tenth is left for CUDA, NCCL and fragmentation (default: that of --gpu)",
    )
    verb.add_argument(
        "--costs",
        type=CostsInput,
        metavar="FILE",
        help="pass times and memory that a run of the job has measured, instead of estimates",
    )
    add_link_flags(verb)


def add_job_words(verb: argparse.ArgumentParser) -> None:
    """Add the flags of the job, which follow last."""
    verb.add_argument(
        "job", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="the flags of the job, after a separate --"
    )


class JobAsIs(NamedTuple):
    """A job as its flags describe it.

    Attributes:
        read: its checked flags.
        today: its plan, costs and memory.
        costs: those of changes, with a whole vocabulary.
        objective: the length that its optimizer step waits for.
        batch: its batch.
        groups: its ranks.
    """

    read: MegatronJob
    today: Today
    costs: Figures
    objective: Metric
    batch: Batch
    groups: RankGroups

    def noting(self, note: str) -> JobAsIs:
        """The same with one more note on its costs."""
        costs = replace(self.today.costs, notes=(*self.today.costs.notes, note))
        return self._replace(today=self.today._replace(costs=costs))

    @property
    def replicas(self) -> int:
        """The ranks that have the same weights, over which they can be sharded."""
        return self.groups.sizes["data"] * self.groups.sizes["context"]


def advise(options: argparse.Namespace) -> str:
    """Plan, and format the advice.

    Raises:
        UserError: the error that the job itself would stop with, a job without a pipeline, or bad options.
    """
    positive_figure("--host-bandwidth", options.host_bandwidth)
    argv = flags_of_job(options)
    if not argv:
        raise UserError("advice is about the flags of a job, which come last, after a separate --; got none; give them")
    own = read_job(options, argv)
    costs = own.costs
    capacity = capacity_of(options, own.today)
    limit = capacity if capacity is not None else max(costs.limit("1p"), *own.today.need.activations)
    bandwidth = options.host_bandwidth * 1e6
    most = math.inf if options.memory_limit is None else costs.limit(options.memory_limit)
    pipeline = Pipeline(
        own.today.timeline.schedule.placement,
        costs,
        limit,
        own.objective,
        bandwidth,
        most,
        options.effort,
        (own.replicas, bandwidth_to_replicas(own.groups, options.gpu, given_links(options))),
    )
    worth = WORTH if options.costs else WORTH_ESTIMATED

    def accepts(flags: Sequence[str], drops: Sequence[str]) -> str | None:
        try:
            checked_megatron_job(changed(argv, flags, drops), *_sizes(options))
        except UserError as error:
            return str(error)
        return None

    variants = tuple(chosen_variants(options.may_change, own.read.args, options.costs))

    def changes() -> Iterator[Change | DroppedVariant]:
        yield from pipeline.named_changes() if options.quick else pipeline.changes()
        for variant in variants:
            yield from attempt(variant.name, partial(_changes_of, variant, options, argv, limit))

    needed = disabled(enabled_overlaps(overlaps_of(own.read.args))) if options.remedies else ()
    own = own.noting(_needs(needed)) if needed else own
    if options.format == "text":
        print(text_of_job(own.today, own.batch, capacity), flush=True)
    with working("planning") as tell:
        adviser = Adviser(
            own.today,
            own.objective,
            capacity,
            accepts,
            worth,
            options.seconds,
            lambda name: tell(f"planning {name}"),
            most,
            _settings(own.read.args, options),
            partial(_tried, options, argv) if options.tries else None,
        )
        found = (
            Advice(own.today, (), own.objective, worth)
            if _is_full(own, worth)
            else adviser.advise(_adding(needed, changes()))
        )
    if options.write is not None:
        _write(options, found)
    others = _with_other_vocabularies(options, argv, own, found)
    if options.format == "json":
        content = content_of(found, own.batch, argv, own.read.unread)
        return json.dumps({**content, "other_vocabularies": [each._asdict() for each in others]}, indent=2) + "\n"
    refusal = partial(_refusal, own, _settings(own.read.args, options)[-1], capacity, most)
    return text_of(found, argv, own.read.unread, refusal, needed, others)


def _with_other_vocabularies(
    options: argparse.Namespace, argv: Sequence[str], own: JobAsIs, found: Advice
) -> tuple[OtherVocabulary, ...]:
    """The advice with other vocabularies, where the job does not say which it has."""

    def job(size: int) -> tuple[Today, Figures]:
        other = read_job(options, changed(argv, ["--vocab-size", str(size)], ()))
        return other.today, other.costs

    if not assumes_vocabulary(own.read.args, options.costs):
        return ()
    return with_others(job, found.best, own.objective)


def _needs(flags: Sequence[str]) -> str:
    """What a job has to do without under a schedule of this package."""
    return (
        f"Every schedule of this package needs {' '.join(flags)} in this job, because W then runs later than what "
        "TransformerEngine overlaps; what these overlaps hide is in no figure."
    )


def _adding(needed: tuple[str, ...], changes: Iterable[Change | DroppedVariant]) -> Iterator[Change | DroppedVariant]:
    """Add flags to all changes that run a schedule of this package."""
    for each in changes:
        if isinstance(each, Change) and each.is_ours:
            yield replace(each, flags=(*each.flags, *needed))
        else:
            yield each


def _refusal(own: JobAsIs, setting: Setting, capacity: float | None, most: float, timeline: Timeline) -> str | None:
    """Why a job cannot run a schedule for experts: an option of Megatron's, its memory, or its hardware queues."""
    if timeline.schedule.pairs:
        try:
            check_pairs(own.read.args)
        except UserError as error:
            return str(error)
    need = need_of(timeline, own.costs)
    if capacity is not None and need.most > capacity * (1 + ROUNDING):
        return f"{format_bytes(need.most)} on the fullest rank, of which {format_bytes(capacity)} may be taken"
    if max(need.activations) > most * (1 + ROUNDING):
        return f"activations of {own.costs.show(max(need.activations))}, above the limit of {own.costs.show(most)}"
    return setting.runs.refusal(timeline.schedule)


def _settings(args: argparse.Namespace, options: argparse.Namespace) -> tuple[Setting, ...]:
    """What the job can be started with: its own environment, then, where it may, one with more hardware queues."""
    runs = replace(job_runs(args, options.gpu, True, options.environment), moved=0.0, host_memory=None)
    more = with_more_queues(runs)
    return (Setting(runs), *(() if more is None else (Setting(more, (SEVERAL,)),)))


def _tried(options: argparse.Namespace, argv: Sequence[str], row: Row) -> Tried:
    """Plan and prove the job with a row's change, as its dry run does."""
    job = checked_megatron_job(changed(argv, row.flags, row.drops), *_sizes(options))
    given = dict(each.split("=", 1) for each in row.environment)
    planned = planned_job(options, job.args, True, {**options.environment, **given})
    kept, messages, weights = map(tuple, zip(*planned.memory, strict=True))
    return Tried(planned.timeline, Need(kept, messages, weights), planned.answer)


def flags_of_job(options: argparse.Namespace) -> list[str]:
    """Return the flags of the job, with those of ``--config FILE`` of our loop in the place of it.

    Raises:
        UserError: no flags, or an unreadable or invalid configuration file.
    """
    from megatron.zero_bubble.planning.job.arguments.parser import expanded

    return expanded(job_words(options))


def _sizes(options: argparse.Namespace) -> tuple[int, int]:
    return checked_world_size(options.nodes, options.gpus_per_node), options.gpus_per_node


def read_job(options: argparse.Namespace, argv: Sequence[str]) -> JobAsIs:
    """Check the job, and plan it as it is.

    Args:
        options: the flags of ``add_job_flags``.
        argv: the flags of the job.

    Raises:
        UserError: the error that the job itself would stop with, a job without a pipeline, or bad options.
    """
    read = checked_megatron_job(argv, *_sizes(options))
    args = read.args
    if args.pipeline_model_parallel_size < 2:
        raise UserError(
            "advice is about pipelines of 2 or more ranks; got --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size}; a job without a pipeline has no bubble"
        )
    costs = job_figures(args, job_layers(args), options.gpu, options.costs, links_of(options, options.gpus_per_node))
    estimated = options.costs is None and costs.on(args.placement)[0].comm_ms > 0
    groups = RankGroups.of(args, options.nodes, options.gpus_per_node)
    costs = with_transfers(costs, groups, options.gpu, given_links(options), estimated)
    own = with_vocabulary(costs, args)
    schedule = planned_schedule(args, own, costs.num_microbatches)
    timeline = timeline_of(schedule, *own.on(args.placement))
    objective: Metric = "span" if has_schedule(args) and args.zero_bubble.post_validation else "makespan"
    batch = Batch(args.batch_sizes.final * args.seq_length, groups.num_ranks, args.data_parallel_size)
    return JobAsIs(read, Today(timeline, own, need_of(timeline, own)), costs, objective, batch, groups)


def _changes_of(variant: Variant, options: argparse.Namespace, argv: Sequence[str], limit: float) -> Iterator[Change]:
    """The changes of a job with other sizes."""
    other = read_job(options, changed(argv, variant.flags, variant.drops))
    schedule = other.today.timeline.schedule
    pipeline = Pipeline(schedule.placement, other.costs, limit, other.objective, options.host_bandwidth * 1e6)
    for change in pipeline.quick_changes(schedule):
        yield replace(
            change,
            name=f"{variant.name}, {change.name}",
            flags=(*variant.flags, *change.flags),
            drops=tuple(dict.fromkeys((*variant.drops, *change.drops))),
            numbers=max(variant.numbers, change.numbers, key=list(NUMBERS).index),
            reorders=False,
        )


def capacity_of(options: argparse.Namespace, today: Today) -> float | None:
    """What a plan may take: the memory of a GPU but for what is reserved, or as much as the job takes today."""
    if not today.costs.in_bytes or not today.costs.knows_weights:
        return None
    return max((1 - _RESERVED) * gpu_bytes(options.gpu_memory or _MEMORY[options.gpu]), today.need.most)


def _is_full(job: JobAsIs, worth: float) -> bool:
    """Whether no order, layout or division can gain enough, because all ranks work nearly all the time."""
    timeline, costs, _ = job.today
    passes = costs.on(timeline.schedule.placement)[0]
    if passes.experts and not timeline.schedule.overlaps:
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

"""``zero-bubble plan``: one schedule, its cost, and its distance from a lower bound."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from megatron.zero_bubble.cli.choices import (
    add_choices,
    added_text,
    check_choices,
    choices_of,
    setup_of,
    with_choices,
    with_files,
)
from megatron.zero_bubble.cli.divisions import division_text
from megatron.zero_bubble.cli.figures import add_figures, figures
from megatron.zero_bubble.cli.layouts import layout_summary
from megatron.zero_bubble.cli.lengths import PlanOfLengths, add_lengths, loads_of
from megatron.zero_bubble.cli.offload import host_limits
from megatron.zero_bubble.cli.plan_text import imbalance_text, limit_text, period_text, plan_text
from megatron.zero_bubble.cli.progress import working
from megatron.zero_bubble.cli.shards import replicas
from megatron.zero_bubble.core.costs.units import parse_memory_limit, refuse_huge
from megatron.zero_bubble.core.errors import Refusal, UserError, attempted
from megatron.zero_bubble.core.formats.plan import PlanFile, read_plan_file
from megatron.zero_bubble.core.formats.torch_csv import plan_to_csv, schedule_to_csv
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.plan import plan_of
from megatron.zero_bubble.core.render.svg import render_svg, zoomable
from megatron.zero_bubble.core.schedules import SCHEDULES
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.choosers import MOST_CHUNKS
from megatron.zero_bubble.planning.codecs import speller
from megatron.zero_bubble.planning.decisions import plan_flag
from megatron.zero_bubble.planning.exclusions import refuse_excluded
from megatron.zero_bubble.planning.experts import verdict
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.job.runnable import check_trainable
from megatron.zero_bubble.planning.layout_plan import LayoutPlan
from megatron.zero_bubble.planning.offload import NO_LIMITS
from megatron.zero_bubble.planning.plan_file import written
from megatron.zero_bubble.planning.plans import ADAPTING, about_1p, limit_verdict, slower_than_1f1b
from megatron.zero_bubble.planning.question import Question, asked
from megatron.zero_bubble.planning.setup import DEFAULT_LIMIT, Given, Setup
from megatron.zero_bubble.planning.source import ZB_AUTO
from megatron.zero_bubble.planning.values import PLAN_ROWS

_OF_TORCH: dict[str, Callable[[Schedule], str]] = {
    "csv": schedule_to_csv,
    "lowered-csv": lambda schedule: plan_to_csv(plan_of(schedule)),
}


def add_plan(verb: argparse.ArgumentParser) -> None:
    """Add the flags of ``plan``."""
    verb.description = (
        "Build a schedule, search for one (zb-auto) or read one from a file, and print its picture, length, bubble "
        "rates and peak memory. Give the costs as times (--forward-ms, ...), as a file (--costs) or as a model "
        "(--config)."
    )
    source = verb.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"{ZB_AUTO} to search for a schedule, or one of {', '.join(SCHEDULES)}; `zero-bubble list` describes them",
    )
    source.add_argument(
        "--schedule-file",
        metavar="FILE",
        help="file with a schedule, as --format json prints it, or in torch's form if it ends in .csv",
    )
    add_figures(verb, or_file="--schedule-file")
    add_search(
        verb,
        limit=f"{ZB_AUTO} plans within it (default: 1p); other schedules are only checked against it, if given",
        placement="one stage per rank (linear), two in a V (vee), several in a loop (loop) or in a wave to the last "
        "rank and back (wave), or the best of the first two, and with --num-chunks of all (auto)",
    )
    plan_flag("num_chunks").add(
        verb,
        "stages per rank, called chunks of the model in Megatron, for interleaved schedules and for "
        f"{ZB_AUTO} on a loop or in a wave, where auto is the best of a few numbers; with --shard-weights, auto is the "
        f"best of 2 to {MOST_CHUNKS}, or fewer if --config has fewer layers per rank (default: 2, for {ZB_AUTO} auto)",
    )
    add_choices(verb)
    add_lengths(verb)
    plan_flag("overlap_experts").add(
        verb,
        "run forwards at the same time as backwards of other microbatches, so that each hides the all-to-all of "
        "the other's experts; a schedule without pairs hides it beneath weight gradients if the costs have experts",
    )
    verb.add_argument(
        "--equal-passes",
        action="store_true",
        help=f"use {', '.join(ADAPTING)} as published, for passes of equal length; by default their passes are "
        "reordered for the given costs within the same memory (fitted)",
    )
    verb.add_argument(
        "--step-ms", type=float, metavar="MS", help="time of the optimizer step; also print the iteration time with it"
    )
    verb.add_argument(
        "--format",
        choices=("text", "json", "svg", "csv", "lowered-csv"),
        default="text",
        help="output format (default: text); an SVG can be zoomed in a browser; csv is the form of "
        "torch.distributed.pipelining, lowered-csv the same with sends and receives",
    )
    verb.set_defaults(command=plan)


def add_search(verb: argparse.ArgumentParser, limit: str, placement: str) -> None:
    """Add memory limit, placement and objective, with the verb's use of the first two, and the decisions for which both
    verbs have the same flag.
    """
    plan_flag("memory_limit").add(
        verb,
        "activation-memory limit per rank, in units of the peak of 1F1B with these costs (1p), or as a size "
        f"(60GiB); {limit}",
    )
    plan_flag("placement").add(
        verb,
        f"stage placement for {ZB_AUTO}: {placement} (default: auto)",
    )
    verb.add_argument(
        "--objective",
        choices=("span", "makespan"),
        default="makespan",
        help="length to minimize: makespan if the optimizer step waits for all ranks, as Megatron's does, span if it "
        "does not wait for other ranks (--zero-bubble-post-validation) (default: makespan)",
    )
    for row in PLAN_ROWS:
        if row.plan is not None and row.plan.help:
            row.plan.add(verb)


@working("planning")
def plan(options: argparse.Namespace) -> str:
    """Make the plan and format it as ``--format`` requests."""
    made = answer(question_of(options))
    timeline, costs, certificate = made.timeline, made.costs, made.certificate
    own = loads_of(options)
    lengths = None if own is None else PlanOfLengths.of(made, own)
    timeline = timeline if lengths is None else lengths.timeline()
    if options.format == "svg":
        return zoomable(render_svg(timeline))
    if options.format in _OF_TORCH:
        return _OF_TORCH[options.format](timeline.schedule)
    layouts, has_units = made.part(LayoutPlan), made.question.replicas is not None
    if options.format == "json":
        return written(made)
    divided = division_text(costs, timeline.schedule.placement)
    text = plan_text(timeline, costs) + (divided if layouts is None else layout_summary(layouts, costs))
    divides = made.question.setup.running(Setup.of(timeline.schedule)).divides
    text += imbalance_text(timeline, costs, layouts is not None, divides or timeline.schedule.overlaps)
    text += "".join(f"{each}\n" for each in made.dropped)
    if lengths is not None:
        return text + lengths.text()
    if layouts is None and not divides:
        slower = slower_than_1f1b(timeline, costs, options.objective)
        text += "" if slower is None else f"{slower}\n"
    text += f"{sentence}\n" if (sentence := verdict(made.question.costs, options.objective)) else ""
    text += added_text(made)
    text += limit_text(timeline, costs, certificate) if certificate else ""
    if counts_in_p(options) and made.question.limit is not None and (about := about_1p(made.question.costs)):
        text += f"{about}\n"
    if made.question.limit is not None and timeline.schedule.overlaps:
        text += f"{limit_verdict(timeline, costs, made.question.limit)[1]}\n"
    if options.step_ms is not None:
        text += period_text(timeline, costs, options.step_ms, only_synchronous=has_units)
    return text


def counts_in_p(options: argparse.Namespace) -> bool:
    """Whether the memory limit is in units of 1F1B's peak, as it is by default."""
    return parse_memory_limit(options.memory_limit or DEFAULT_LIMIT)[1] == "p"


def question_of(options: argparse.Namespace, of_job: Figures | None = None) -> Question:
    """What the flags of ``plan`` ask.

    Args:
        of_job: costs and sizes, in place of those that flags give.

    Raises:
        UserError: for incompatible flags, or invalid figures.
    """
    check_choices(options)
    refuse_excluded(choices_of(options), speller("plan"))
    _check(options)
    planned = None if options.schedule_file is None else read_plan_file(options.schedule_file)
    file = None if planned is None else planned.schedule
    costs = _figures_of(options, planned) if of_job is None else of_job
    refuse_excluded(with_files(choices_of(options), costs, file), speller("plan"))
    costs = with_choices(options, costs)
    setup = setup_of(options, costs, file)
    if planned is not None:
        setup = replace(setup, order=Given(options.schedule_file, planned))
    host = NO_LIMITS if setup.offload is None else host_limits(options, costs)
    return asked(setup, costs, options.memory_limit, host, replicas(options))


def _check(options: argparse.Namespace) -> None:
    """Refuse flags that apply only to other schedules."""
    if options.schedule != ZB_AUTO and options.placement is not None:
        raise UserError(f"--placement applies only to {ZB_AUTO}; other schedules have a fixed placement; leave it out")
    for row in PLAN_ROWS if options.schedule_file is not None else ():
        if row.plan is not None and row.is_of_file and getattr(options, row.plan.option) not in (None, False):
            raise UserError(f"--{row.plan.name} does not apply to a schedule file, which has its own; leave it out")
    if options.equal_passes and options.schedule not in ADAPTING:
        raise UserError(f"--equal-passes applies only to {', '.join(ADAPTING)}; leave it out")
    if options.step_ms is not None and not 0 <= options.step_ms < math.inf:
        raise UserError(
            f"--step-ms must be a finite time, 0 or above; got {options.step_ms}; give the time of the optimizer step"
        )
    refuse_huge(**{"--step-ms": options.step_ms})


def _figures_of(options: argparse.Namespace, planned: PlanFile | None) -> Figures:
    loads = loads_of(options)
    if planned is None:
        return figures(options, None, None if loads is None else len(loads))
    file = planned.schedule
    for flag, count, own in (
        ("--num-ranks", options.num_ranks, file.num_ranks),
        ("--num-microbatches", options.num_microbatches, file.num_microbatches),
        ("the number of --lengths", None if loads is None else len(loads), file.num_microbatches),
    ):
        if count not in (None, own):
            raise UserError(f"{flag} must equal the value in the schedule file, {own}; got {count}; leave it out")
    costs = figures(options, file.num_ranks, file.num_microbatches)
    return replace(costs, notes=(*costs.notes, *_remarks(planned)))


def _remarks(planned: PlanFile) -> Iterator[str]:
    """Say what a run would refuse about a valid schedule, and what else than the schedule it would take."""
    refused = attempted(partial(check_trainable, planned.schedule))
    if isinstance(refused, Refusal):
        yield f"A run would refuse this schedule: {refused.reason}."
    if planned.besides:
        yield f"Only the schedule of the file is planned here; a run also takes its {', '.join(planned.besides)}."

"""``zero-bubble plan``: one schedule, its cost, and its distance from a lower bound."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from megatron.zero_bubble.cli.choices import choices_of
from megatron.zero_bubble.cli.divisions import division_text
from megatron.zero_bubble.cli.figures import add_figures, figures
from megatron.zero_bubble.cli.layouts import BY_COST, add_layout, layout_summary
from megatron.zero_bubble.cli.offload import (
    add_offload,
    offload_summary,
    offloaded,
    offloads,
    with_copies,
)
from megatron.zero_bubble.cli.plan_text import limit_text, period_text, plan_text
from megatron.zero_bubble.cli.progress import working
from megatron.zero_bubble.cli.shards import (
    AUTO_COUNT,
    add_shards,
    number_or_auto,
    shard_summary,
    sharded,
    shards,
    with_shards,
)
from megatron.zero_bubble.cli.slices import add_slices, cuts_of
from megatron.zero_bubble.cli.vocabulary import add_vocabulary, variants_of
from megatron.zero_bubble.costs.units import refuse_huge
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.formats.plan import Certificate, read_schedule_file
from megatron.zero_bubble.ir import Placement, Schedule, Slices
from megatron.zero_bubble.ir.collection import without_collection
from megatron.zero_bubble.ir.vocabulary import algorithm_of
from megatron.zero_bubble.job.runnable import check_trainable
from megatron.zero_bubble.planning.cuts import Cuts, shortest
from megatron.zero_bubble.planning.exclusions import refuse_excluded
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.layouts import LayoutPlan, lay_out
from megatron.zero_bubble.planning.offload_search import best_offloaded, search_limits
from megatron.zero_bubble.planning.plan_file import written
from megatron.zero_bubble.planning.plans import (
    ADAPTING,
    PlannedSchedule,
    auto,
    auto_search,
    bound,
    fitted,
    fitting_search,
    slower_than_1f1b,
    with_units,
)
from megatron.zero_bubble.planning.shards import ShardPlan
from megatron.zero_bubble.planning.source import AUTO, DEFAULT_LIMIT
from megatron.zero_bubble.planning.vocabulary import Planned, Variant, best_of, known_schedules, of_variants, searched
from megatron.zero_bubble.render.svg import render_svg, zoomable
from megatron.zero_bubble.schedules import SCHEDULES, build, recipe
from megatron.zero_bubble.schedules.recipe import DEFAULT_SLICES
from megatron.zero_bubble.search.auto import PLACEMENTS, PlacementChoice

MOST_CHUNKS = 4
"""Most stages per rank to choose from, where nothing is given."""


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
        help=f"{AUTO} to search for a schedule, or one of {', '.join(SCHEDULES)}; `zero-bubble list` describes them",
    )
    source.add_argument("--schedule-file", metavar="FILE", help="JSON file with a schedule, as --format json prints it")
    add_figures(verb, or_file="--schedule-file")
    add_search(
        verb,
        limit=f"{AUTO} plans within it (default: 1p); other schedules are only checked against it, if given",
        placement="one stage per rank (linear), two in a V (vee), or the better of both (auto)",
    )
    verb.add_argument(
        "--num-chunks",
        type=number_or_auto,
        metavar="N|auto",
        help="stages per rank for interleaved schedules, called chunks of the model in Megatron; with --shard-weights, "
        f"auto is the best of 2 to {MOST_CHUNKS}, or fewer if --config has fewer layers per rank (default: 2)",
    )
    add_layout(verb)
    add_slices(verb, f"default: {len(DEFAULT_SLICES)} for schedules whose name begins with seq-, else 1")
    add_vocabulary(verb)
    add_offload(verb)
    add_shards(verb)
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
        choices=("text", "json", "svg"),
        default="text",
        help="output format (default: text); an SVG can be zoomed in a browser",
    )
    verb.set_defaults(command=plan)


def add_search(verb: argparse.ArgumentParser, limit: str, placement: str) -> None:
    """Add the flags for the search: memory limit, placement and objective, with the verb's use of the first two."""
    verb.add_argument(
        "--memory-limit",
        metavar="LIMIT",
        help=f"activation-memory limit per rank, in units of 1F1B's peak (1p) or as a size (60GiB); {limit}",
    )
    verb.add_argument(
        "--placement",
        choices=("linear", "vee", "auto"),
        help=f"stage placement for {AUTO}: {placement} (default: auto)",
    )
    verb.add_argument(
        "--objective",
        choices=("span", "makespan"),
        default="span",
        help="length to minimize: span if the optimizer step of a rank does not wait for other ranks "
        "(--zero-bubble-post-validation), makespan if it does (default: span)",
    )


@without_collection()
@working("planning")
def plan(options: argparse.Namespace) -> str:
    """Make the plan and format it as ``--format`` requests."""
    made = make_plan(options)
    timeline, costs, certificate = made.timeline, made.costs, made.certificate
    if options.format == "svg":
        return zoomable(render_svg(timeline))
    layouts, moved = made.layouts, made.offloaded
    if options.format == "json":
        return written(made)
    divided = division_text(costs, timeline.schedule.placement)
    text = plan_text(timeline, costs) + (divided if layouts is None else layout_summary(layouts))
    if layouts is None and made.shards is None and algorithm_of(timeline.schedule) is None:
        slower = slower_than_1f1b(timeline, costs, options.objective)
        text += "" if slower is None else f"{slower}\n"
    text += "" if moved is None else offload_summary(moved, costs)
    text += "" if made.shards is None else shard_summary(options, made.shards, costs)
    text += limit_text(timeline, costs, certificate) if certificate else ""
    if options.step_ms is not None:
        text += period_text(timeline, costs, options.step_ms, only_synchronous=made.shards is not None)
    return text


def make_plan(options: argparse.Namespace) -> PlannedSchedule:
    """Make the plan that the flags of ``plan`` request.

    Raises:
        UserError: for incompatible flags, invalid figures, or a schedule that does not exist for them.
    """
    refuse_excluded(choices_of(options))
    if options.schedule != AUTO and options.placement is not None:
        raise UserError(f"--placement applies only to {AUTO}; other schedules have a fixed placement; leave it out")
    if options.num_chunks is not None and options.schedule in (AUTO, None):
        raise UserError("--num-chunks applies only to interleaved schedules selected by name; leave it out")
    if options.num_chunks == AUTO_COUNT and not options.shard_weights:
        raise UserError(
            "--num-chunks auto applies only to --shard-weights, whose stages per rank are chosen together with units; "
            "give a number, or use zero-bubble compare, which lists several"
        )
    if options.equal_passes and options.schedule not in ADAPTING:
        raise UserError(f"--equal-passes applies only to {', '.join(ADAPTING)}; leave it out")
    if options.step_ms is not None and not 0 <= options.step_ms < math.inf:
        raise UserError(
            f"--step-ms must be a finite time, 0 or above; got {options.step_ms}; give the time of the optimizer step"
        )
    refuse_huge(**{"--step-ms": options.step_ms})
    cuts = cuts_of(options)
    if cuts is not None and options.schedule_file is not None:
        raise UserError("--num-slices and --slice-cuts do not apply to a schedule file, which has its own; drop them")
    moves = offloads(options)
    file = None if options.schedule_file is None else read_schedule_file(options.schedule_file)
    costs = _figures_of(options, file)
    costs = with_copies(options, costs) if moves else costs
    sharding = shards(options)
    costs = with_shards(options, costs) if sharding else costs
    started = time.perf_counter()
    if options.layout == BY_COST:
        costs = costs.evenly()
    make, limit = partial(_found, options, costs, cuts, file), _limit(options, costs)
    moved = units = None
    if sharding:
        units = _sharded(options, costs, cuts, file)
        best = Planned(units.timeline, costs)
        timeline = units.timeline
    elif moves:
        best, moved = best_offloaded(
            make,
            partial(offloaded, options, limit=limit),
            _search_limits(options, costs, limit),
            limit,
            options.objective,
        )
        timeline = moved.timeline
    else:
        best = best_of(make(limit), limit, options.objective)
        timeline = best.timeline
    seconds = time.perf_counter() - started
    certificate = None
    if limit is not None and not sharding:
        certificate = _certify(options, best.costs, limit, timeline.schedule, seconds)
    recomputes = bool(options.recompute_logits) and algorithm_of(timeline.schedule) is not None
    return PlannedSchedule(timeline, best.costs, certificate, best.layouts, moved, units, recomputes)


def searches(options: argparse.Namespace) -> bool:
    """Whether ``make_plan`` searches, which takes seconds, or only builds a known schedule."""
    return options.layout == BY_COST or options.schedule == AUTO or _fits(options)


def _fits(options: argparse.Namespace) -> bool:
    return options.schedule in ADAPTING and not options.equal_passes


def _figures_of(options: argparse.Namespace, file: Schedule | None) -> Figures:
    if file is None:
        return figures(options)
    for flag, count, own in (
        ("--num-ranks", options.num_ranks, file.num_ranks),
        ("--num-microbatches", options.num_microbatches, file.num_microbatches),
    ):
        if count not in (None, own):
            raise UserError(f"{flag} must equal the value in the schedule file, {own}; got {count}; leave it out")
    costs = figures(options, file.num_ranks, file.num_microbatches)
    return replace(costs, notes=(*costs.notes, *_refusals(file)))


def _refusals(schedule: Schedule) -> tuple[str, ...]:
    """Say what a run would refuse about a valid schedule, which a plan may still have."""
    try:
        check_trainable(schedule)
    except UserError as error:
        return (f"A run would refuse this schedule: {error}.",)
    return ()


def _limit(options: argparse.Namespace, costs: Figures) -> float | None:
    """The memory limit that the plan is checked against, in the unit of the costs; None if there is none."""
    text = options.memory_limit or (DEFAULT_LIMIT if options.schedule == AUTO else None)
    return None if text is None else costs.limit(text)


def _search_limits(options: argparse.Namespace, costs: Figures, limit: float | None) -> tuple[float | None, ...]:
    """The memory limits to make schedules for, of which one is taken after offloading."""
    if options.schedule == AUTO:
        assert limit is not None, "a search has a limit"
        return search_limits(costs, limit, vocabulary=any(each.algorithm for each in variants_of(options, costs)))
    return (None,) if limit is None else (None, limit)


def _found(
    options: argparse.Namespace, costs: Figures, cuts: Cuts | None, file: Schedule | None, limit: float | None
) -> Iterator[Planned]:
    """Yield the schedules that the flags admit within ``limit``: one per variant, or more if insertions are searched
    for; with the layout that is best within the limit, if it is chosen by cost.
    """
    if options.layout == BY_COST:
        layouts = _laid_out(options, costs, cuts, file, limit)
        yield Planned(layouts.best.timeline, layouts.best.costs, layouts)
        return
    choices = variants_of(options, costs, file)
    placement: PlacementChoice = options.placement or "auto"
    offloaded_limit = _limit(options, costs) if offloads(options) else None

    def make(variant: Variant) -> Iterator[Schedule]:
        own = variant.costs
        if file is not None:
            yield file
        elif variant.algorithm is not None and options.schedule == AUTO and cuts is None:
            assert limit is not None, "a search has a limit"
            yield from searched(variant, limit, placement, options.objective)
        else:
            if options.schedule == AUTO and cuts is None and limit == offloaded_limit:
                yield from known_schedules(own, placement, options.objective)
            yield _build(options, own, None if cuts is None else cuts.candidates(own), placement, limit)

    yield from of_variants(choices, make, limit, options.objective)


def _laid_out(
    options: argparse.Namespace, costs: Figures, cuts: Cuts | None, file: Schedule | None, most: float | None
) -> LayoutPlan:
    """Plan the layout together with the schedule."""
    names: dict[Placement, PlacementChoice] = {}
    if file is not None:
        placements = [file.placement]
    elif options.schedule == AUTO:
        names = {place(costs.num_ranks): name for name, place in PLACEMENTS.items()}
        placements = [on for on, name in names.items() if options.placement in (None, "auto", name)]
    else:
        known = recipe(options.schedule)
        placements = [known.placement(costs.num_ranks, known.num_chunks(options.num_chunks))]
    candidates = None if cuts is None else cuts.candidates(costs)

    def make(own: Figures, placement: Placement) -> Schedule:
        return file or _build(options, own, candidates, names.get(placement, "auto"), most)

    search = None
    if candidates is None and options.schedule == AUTO:
        assert most is not None, "a search has a limit"
        search = auto_search(most, options.objective)
    elif candidates is None and _fits(options):
        search = fitting_search(options.schedule, options.objective)
    return lay_out(costs, placements, make, most, options.objective, search)


def _sharded(options: argparse.Namespace, costs: Figures, cuts: Cuts | None, file: Schedule | None) -> ShardPlan:
    slices = None if cuts is None else cuts.candidates(costs)
    has_units = file is None and recipe(options.schedule).has_units
    limit = _limit(options, costs)

    def make(chunks: int | None, unit: int | None) -> Schedule:
        own = argparse.Namespace(**{**vars(options), "num_chunks": chunks})
        return file or _build(own, costs, slices, "auto", limit, unit)

    counts: Sequence[int | None] = [options.num_chunks]
    if options.num_chunks == AUTO_COUNT:
        most = max(2, min(costs.most_layers or MOST_CHUNKS, MOST_CHUNKS))
        counts = range(2, most + 1) if recipe(options.schedule).shape == "interleaved" else (None,)
    return sharded(options, costs, [partial(make, chunks) for chunks in counts], has_units)


def _build(
    options: argparse.Namespace,
    costs: Figures,
    slices: tuple[Slices, ...] | None,
    placement: PlacementChoice,
    limit: float | None,
    unit: int | None = None,
) -> Schedule:
    if options.schedule == AUTO:
        assert limit is not None, "a search has a limit"
        search = partial(auto, costs, limit, placement, options.objective)
        return search() if slices is None else shortest(search, slices, costs, limit, options.objective)
    sizes = {"num_ranks": costs.num_ranks, "num_microbatches": costs.num_microbatches}
    if recipe(options.schedule).sliced:
        candidates = slices or Cuts(len(DEFAULT_SLICES)).candidates(costs)
        make = partial(build, options.schedule, **sizes, num_chunks=options.num_chunks)
        return shortest(lambda own: make(num_slices=own), candidates, costs, limit, options.objective)
    if slices is not None:
        recipe(options.schedule).slices(max(slices, key=len))
    unit = unit or options.unit_microbatches or None
    schedule = build(options.schedule, **sizes, num_chunks=options.num_chunks, unit_microbatches=unit)
    if recipe(options.schedule).has_units and unit is None:
        make = partial(build, options.schedule, **sizes, num_chunks=options.num_chunks)
        return with_units(make, costs, options.objective, math.inf if limit is None else limit)
    return schedule if options.equal_passes else fitted(schedule, costs, options.objective)


def _certify(
    options: argparse.Namespace, costs: Figures, limit: float, schedule: Schedule, seconds: float
) -> Certificate:
    moves = offloads(options)
    kinds = schedule.slices, algorithm_of(schedule), moves
    own = with_copies(options, costs) if moves else costs
    best = bound(own, schedule.placement, limit, options.objective, *kinds)
    return Certificate(options.objective, limit, limit / costs.microbatch, best, seconds)

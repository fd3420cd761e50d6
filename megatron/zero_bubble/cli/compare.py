"""``zero-bubble compare``: a table of all schedules for the same costs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

from megatron.zero_bubble.cli.break_even import BreakEven, Contenders
from megatron.zero_bubble.cli.choices import choices_of, common_choices, with_files
from megatron.zero_bubble.cli.compare_table import ComparedRow, Table, short_text, table_text
from megatron.zero_bubble.cli.figures import add_figures, figures
from megatron.zero_bubble.cli.figures import replicas as num_replicas
from megatron.zero_bubble.cli.offload import add_offload, host_limits, offloads, with_copies
from megatron.zero_bubble.cli.plan import add_search, counts_in_p
from megatron.zero_bubble.cli.plan_text import imbalance_text, picture
from megatron.zero_bubble.cli.progress import progress, working
from megatron.zero_bubble.cli.shards import add_shards, add_tensor, listed_shards, shards
from megatron.zero_bubble.cli.slices import add_slices, check_cuts
from megatron.zero_bubble.cli.vocabulary import add_vocabulary, divided_of, with_vocabulary
from megatron.zero_bubble.cli.winner import how_to_run
from megatron.zero_bubble.core.analysis.bounds import least_memory
from megatron.zero_bubble.core.analysis.score import Goal, length_ms, within
from megatron.zero_bubble.core.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.core.ir import WHOLE, Placement, Slices
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search.placements import label_of, placements
from megatron.zero_bubble.planning.answer import Answer, answer
from megatron.zero_bubble.planning.candidates import FITTED, Candidate, Comparison, comparable, most_chunks
from megatron.zero_bubble.planning.choosers import with_costs
from megatron.zero_bubble.planning.codecs import setup_of_flags, speller
from megatron.zero_bubble.planning.cuts import with_candidates
from megatron.zero_bubble.planning.decisions import plan_flag
from megatron.zero_bubble.planning.exclusions import refuse_excluded
from megatron.zero_bubble.planning.experts import verdict
from megatron.zero_bubble.planning.offer import Offer
from megatron.zero_bubble.planning.plans import about_1p, bound, peak_memory, rank_memory
from megatron.zero_bubble.planning.question import Offloading, replicas_of, search_limits
from megatron.zero_bubble.planning.score import DroppedVariant, attempt
from megatron.zero_bubble.planning.setup import BY_COST, Setup
from megatron.zero_bubble.planning.shards import Replicas
from megatron.zero_bubble.planning.source import ZB_AUTO
from megatron.zero_bubble.planning.vocabulary import Variant, are_divided, variants


def add_compare(verb: argparse.ArgumentParser) -> None:
    """Add the flags of ``compare``."""
    verb.description = (
        "Print one line per schedule for the same costs, shortest first, and a lower bound on the length of any "
        "schedule within the memory limit; draw the shortest schedule within it. Give the costs as times "
        "(--forward-ms, ...), as a file (--costs) or as a model (--config)."
    )
    add_figures(verb)
    add_search(
        verb,
        limit="schedules over it are listed last (default: 1p)",
        placement="one stage per rank (linear), two in a V (vee), several in a loop (loop) or in a wave to the last "
        "rank and back (wave), or a row for each of the first two, and with --num-chunks for all (auto)",
    )
    plan_flag("num_chunks").add(
        verb,
        f"stages per rank of {ZB_AUTO} on a loop or in a wave, auto for a row for each of a few numbers (default: "
        "none of these rows, or auto with --placement loop or wave)",
    )
    verb.add_argument(
        "--max-chunks",
        type=int,
        metavar="N",
        help="most stages per rank (chunks, in Megatron) to try for interleaved schedules (default: 4, or fewer if "
        "--config has fewer layers per rank)",
    )
    add_slices(verb, "default: no schedules of slices")
    add_vocabulary(verb)
    add_offload(verb)
    add_shards(verb)
    add_tensor(verb)
    plan_flag("overlap_experts").add(
        verb,
        "also list schedules whose forwards run at the same time as backwards of other microbatches, so that "
        "each hides the all-to-all of the other's experts, and, if the costs have experts, schedules that hide it "
        "beneath weight gradients; lower bounds are then left out",
    )
    verb.add_argument(
        "--equal-passes",
        action="store_true",
        help=f"list schedules for passes of equal length only as published; by default a second row, {FITTED!r}, has "
        "their passes reordered for the given costs within the same memory",
    )
    verb.add_argument(
        "--all",
        action="store_true",
        help="also list the schedules that are only for comparison, because another one is better in every respect",
    )
    verb.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")
    verb.set_defaults(command=compare)


def compare(options: argparse.Namespace) -> str:
    """Make the table as ``--format`` requests: schedules within the limit first, shortest first."""
    check_cuts(options)
    refuse_excluded(common_choices(options), speller("plan"))
    moves = offloads(options)
    costs = figures(options)
    if are_divided(costs):  # then no row is without the passes of the vocabulary
        refuse_excluded(with_files(choices_of(options), costs), speller("plan"))
    rate, by_cost, sharded = None, options.layout == BY_COST, shards(options)
    if sharded:
        costs, rate = listed_shards(options, costs)
    costs = with_vocabulary(options, costs.evenly() if by_cost else costs)
    limit = costs.limit(options.memory_limit or "1p")
    about_limit = about_1p(costs) if counts_in_p(options) else None
    searched, without = with_costs(costs, placements(options.placement or "auto", costs.num_ranks, options.num_chunks))
    chunks = most_chunks(options.max_chunks, costs)
    divided = divided_of(options, costs, default="auto" if by_cost else None)
    costs = with_copies(options, costs) if moves else costs
    setup = setup_of_flags(vars(options), vocabulary=divided and divided.algorithm)
    choices, moving, replicas = variants(costs, divided), None, None
    if moves:
        limits = search_limits(costs, limit, divided is not None)
        # Without --memory-limit, offloading saves as much as it can; the table marks what is above the default.
        moving = Offloading(limits, limit if options.memory_limit else None, host_limits(options, costs))
    if sharded:
        replicas = replicas_of(setup, costs, options.memory_limit, num_replicas(options))
    cuts = None if setup.cuts is None else with_candidates(setup.cuts, costs)
    alike = Setup(offload=setup.offload if moves else None, step=setup.step)
    comparison = Comparison(chunks, limit, searched, not options.equal_passes, alike, moving)
    has_whole = any(variant.algorithm is None for variant in choices)
    whole = [*comparison.whole(costs)] if has_whole else []
    halves = [row for variant in choices if variant.algorithm for row in comparison.divided(variant)]
    hides = [*comparison.hidden(costs)] if options.pairs else []
    of_units = [] if replicas is None else [*comparison.sharded(costs, replicas)]
    listed: list[Candidate | DroppedVariant] = [*without, *whole]
    listed += comparison.sliced(costs, cuts) if cuts and has_whole else ()
    listed += halves
    if by_cost:  # without --vocabulary, a divided one is only what layouts are compared with
        both = halves if options.vocabulary or not has_whole else []
        listed += comparison.laid_out((*whole, *both, *hides, *of_units))
    listed += (*hides, *of_units)
    if replicas is not None and rate is not None:
        listed += comparison.tensor(costs, replicas, rate)
    listed, hidden = comparable(listed, options.all)
    rows, absent, best, break_even = _simulated(listed, limit, options.objective, replicas)
    bounds_of = partial(_bounds, Goal(options.objective, limit), () if options.pairs else searched, moves)
    alike_cut = () if cuts is None or len(cuts.among) > 1 else cuts.among
    with working("computing lower bounds"):
        bounds = _least(bounds_of(variant) for variant in choices)
        sliced_bounds = bounds_of(choices[0], *alike_cut) if any(len(slices) > 1 for slices in alike_cut) else {}
    table = Table(
        objective=options.objective,
        num_ranks=costs.num_ranks,
        num_microbatches=costs.num_microbatches,
        memory_limit=limit,
        lower_bound_ms=bounds,
        sliced_lower_bound_ms=sliced_bounds,
        rows=_with_speedups(rows, options.objective),
        absent=(*absent, *hidden),
        gain_of_vocabulary=None,
        break_even=break_even,
    )
    table = replace(table, gain_of_vocabulary=_gain(table))
    costs = choices[-1].costs
    if options.format == "json":
        return json.dumps(table.content, indent=2) + "\n"
    text = table_text(table, costs, about_limit)
    text += f"{sentence}\n" if (sentence := verdict(costs, options.objective)) else ""
    if best is None:
        return text
    timeline, candidate, row = best
    bound = " (a lower bound)" if costs.halves(timeline.schedule.placement) else ""
    uneven = imbalance_text(timeline, costs, by_cost, divided is not None)
    run = how_to_run(options, candidate, row)
    return f"{text}\nShortest within the limit{bound}: {picture(timeline)}{uneven}{run}\n"


class _Winner(NamedTuple):
    """The shortest schedule within the limit."""

    timeline: Timeline
    candidate: Candidate
    row: ComparedRow


def _simulated(
    candidates: Sequence[Candidate | DroppedVariant], limit: float, objective: Metric, replicas: Replicas | None = None
) -> tuple[list[ComparedRow], list[str], _Winner | None, BreakEven | None]:
    """Return the rows, the reasons why schedules are missing, the shortest schedule within the limit, and how long a
    message must take for another schedule to be shorter.

    No other timeline is kept: on 64 ranks, all of them together need more than a gigabyte.
    """
    rows, absent, contenders = [], [], Contenders(objective)
    best: _Winner | None = None
    shortest = True, math.inf

    def so_far() -> str:
        return "" if best is None else f"; shortest so far: {best.row.schedule}, {shortest[1]:,.1f} ms"

    with progress("planning", [(each.name, each) for each in candidates], so_far) as (listed, show):
        for found in chain.from_iterable(map(_answered, listed)):
            if isinstance(found, DroppedVariant):
                absent.append(found.reason)
                continue
            candidate, made, timeline = found
            absent += [f"{candidate.name}: {dropped}" for dropped in made.dropped]
            rows.append(row := _row(timeline, made, candidate, limit, replicas))
            show(short_text(row, objective))
            if row.within_limit:
                ms = length_ms(row, objective)
                own = Offer(timeline.schedule, made.costs, offloaded=made.offloaded, shards=made.shards)
                contenders.add(own, f"{row.schedule} ({row.placement})", row.messages, ms)
                length = row.is_lower_bound, ms  # a known length is better than any lower bound
                if best is None or length < shortest:
                    best, shortest = _Winner(timeline, candidate, row), length
    return rows, list(dict.fromkeys(absent)), best, contenders.break_even()  # several schedules may lack the same


def _answered(
    candidate: Candidate | DroppedVariant,
) -> Iterator[tuple[Candidate, Answer, Timeline] | DroppedVariant]:
    if isinstance(candidate, DroppedVariant):
        yield candidate
        return

    def make() -> Iterator[tuple[Candidate, Answer, Timeline]]:
        made = answer(candidate.question)
        yield candidate, made, _titled(made, candidate)  # here, costs refuse a schedule whose stages they lack

    yield from attempt(candidate.name, make)


def _titled(made: Answer, candidate: Candidate) -> Timeline:
    """The timeline, with the name that the schedule has in the table."""
    schedule = made.timeline.schedule
    return replace(made.timeline, schedule=replace(schedule, name=candidate.title.format(schedule.num_slices)))


def _least(bounds: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the lowest bound per placement, which holds for the schedules of all variants."""
    least: dict[str, float] = {}
    for each in bounds:
        for name, ms in each.items():
            least[name] = min(ms, least.get(name, ms))
    return least


def _bounds(
    goal: Goal,
    searched: Sequence[Placement],
    offload: bool,
    variant: Variant,
    slices: Slices = WHOLE,
) -> dict[str, float]:
    """Return the lower bound for each placement on which some schedule fits the limit."""
    bounds: dict[str, float] = {}
    costs = variant.costs
    for placement in searched:
        if within(max(least_memory(costs.on(placement)[1], placement, fused=True)), goal.limit):
            work = Workload(placement, costs.num_microbatches, slices, variant.algorithm)
            bounds[label_of(placement)] = bound(costs, work, goal, offload).value_ms
    return bounds


def _row(
    timeline: Timeline, made: Answer, candidate: Candidate, limit: float, replicas: Replicas | None
) -> ComparedRow:
    schedule, costs, offload_plan = timeline.schedule, made.costs, made.offloaded
    ranks = schedule.placement.stage_to_rank
    whole = 2 * schedule.num_microbatches * sum(a != b for a, b in pairwise(ranks))
    kept = peak_memory(timeline, costs)
    replicas = None if replicas is None else replace(replicas, count=replicas.count // (candidate.tensor_parallel or 1))
    sent, static = (None, None) if replicas is None else replicas.bytes_of(made.shards, costs, schedule.placement)
    total = [*rank_memory(timeline, costs)]
    if static is not None and replicas is not None and replicas.limit < math.inf:  # the limit includes it
        total = [peak + own for peak, own in zip(total, static, strict=True)]
    return ComparedRow(
        schedule=schedule.name,
        work=Workload.of(schedule),
        span_ms=timeline.span_ms,
        makespan_ms=timeline.makespan_ms,
        bubble_rate_span=timeline.bubble_rate("span"),
        bubble_rate_makespan=timeline.bubble_rate("makespan"),
        idle_rate_span=timeline.idle_rate("span"),
        idle_rate_makespan=timeline.idle_rate("makespan"),
        imbalance=timeline.imbalance,
        peak_microbatches=max(timeline.peak_activation),
        peak_memory=kept,
        messages=whole * schedule.num_slices,
        message_bytes=None if costs.message_bytes is None else whole * costs.message_bytes,
        speedup_over_1f1b=None,
        speedup_over_interleaved=None,
        within_limit=within(max(total), limit),
        layout=None if made.layouts is None else made.layouts.best.text,
        offloaded_share=None if offload_plan is None else offload_plan.share,
        host_peak=None if offload_plan is None else max(offload_plan.host_peak),
        gathers=None if made.shards is None else max(made.shards.gathers),
        reductions=None if made.shards is None else max(made.shards.reductions),
        static_bytes=None if static is None else max(static),
        replica_bytes=None if sent is None else max(sent),
        tensor_parallel=candidate.tensor_parallel,
        tensor_bytes=candidate.tensor_bytes,
        is_lower_bound=costs.halves(schedule.placement),
        needed_layout=costs.needed_layout(schedule.placement) if made.layouts is None else None,
    )


def _with_speedups(rows: Sequence[ComparedRow], objective: Metric) -> tuple[ComparedRow, ...]:
    """Sort the rows, and compare each with 1F1B and with the best interleaved schedule."""

    def cost(row: ComparedRow) -> float:
        return length_ms(row, objective)

    plain = min((cost(row) for row in rows if row.schedule == "1f1b"), default=None)
    exact = [row for row in rows if not row.is_lower_bound]
    interleaved = (row for row in exact if row.schedule.startswith("interleaved-1f1b") and row.layout is None)
    looped = min(map(cost, interleaved), default=None)
    return tuple(
        replace(
            row,
            speedup_over_1f1b=None if row.is_lower_bound else _ratio(plain, cost(row)),
            speedup_over_interleaved=None if row.is_lower_bound else _ratio(looped, cost(row)),
        )
        for row in sorted(rows, key=lambda row: (not row.within_limit, cost(row)))
    )


def _gain(table: Table) -> float | None:
    whole, divided = table.shortest(divided=False), table.shortest(divided=True)
    if whole is None or divided is None or not length_ms(whole, table.objective):
        return None
    return 1 - length_ms(divided, table.objective) / length_ms(whole, table.objective)


def _ratio(baseline: float | None, ms: float) -> float | None:
    return None if baseline is None or ms == 0 else baseline / ms

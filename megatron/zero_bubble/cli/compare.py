"""``zero-bubble compare``: a table of all schedules for the same costs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from megatron.zero_bubble.cli.break_even import BreakEven, Contenders
from megatron.zero_bubble.cli.choices import (
    add_choices,
    check_choices,
    columns_of,
    common_choices,
    setup_of,
    with_choices,
)
from megatron.zero_bubble.cli.compare_table import Table, short_text, table_text
from megatron.zero_bubble.cli.compared_row import ComparedRow
from megatron.zero_bubble.cli.figures import add_figures, figures
from megatron.zero_bubble.cli.offload import host_limits
from megatron.zero_bubble.cli.plan import add_search, counts_in_p
from megatron.zero_bubble.cli.plan_text import imbalance_text, picture
from megatron.zero_bubble.cli.progress import progress, working
from megatron.zero_bubble.cli.shards import add_tensor, replicas, with_tensor
from megatron.zero_bubble.cli.vocabulary import GainOverLayouts, asks_to_divide
from megatron.zero_bubble.cli.winner import how_to_run
from megatron.zero_bubble.core.analysis.score import length_ms, within
from megatron.zero_bubble.core.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search.placements import placements
from megatron.zero_bubble.planning.answer import Answer, answer
from megatron.zero_bubble.planning.candidates import FITTED, Candidate, Comparison, comparable, most_chunks
from megatron.zero_bubble.planning.choosers import with_costs
from megatron.zero_bubble.planning.codecs import speller
from megatron.zero_bubble.planning.decisions import plan_flag
from megatron.zero_bubble.planning.exclusions import refuse_excluded
from megatron.zero_bubble.planning.experts import verdict
from megatron.zero_bubble.planning.layout_plan import LayoutPlan
from megatron.zero_bubble.planning.plans import about_1p, peak_memory, rank_memory
from megatron.zero_bubble.planning.question import Offloading, search_limits
from megatron.zero_bubble.planning.score import DroppedVariant, attempt
from megatron.zero_bubble.planning.setup import BY_COST
from megatron.zero_bubble.planning.shards import Replicas, replicas_of
from megatron.zero_bubble.planning.source import ZB_AUTO
from megatron.zero_bubble.planning.vocabulary import variants_of


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
    add_choices(verb)
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
    check_choices(options)
    refuse_excluded(common_choices(options), speller("plan"))
    costs = figures(options)
    refuse_excluded(common_choices(options, costs), speller("plan"))
    by_cost = options.layout == BY_COST
    costs, rate = with_tensor(options, with_choices(options, costs))
    costs = costs.evenly() if by_cost else costs
    limit = costs.limit(options.memory_limit or "1p")
    about_limit = about_1p(costs) if counts_in_p(options) else None
    searched, without = with_costs(costs, placements(options.placement or "auto", costs.num_ranks, options.num_chunks))
    setup = setup_of(options, costs, default="auto" if by_cost else None)
    kinds, moving = variants_of(setup, costs), None
    divides = any(variant.algorithm for variant in kinds)
    if setup.offload is not None:
        # Without --memory-limit, offloading saves as much as it can; the table marks what is above the default.
        most = limit if options.memory_limit else None
        moving = Offloading(search_limits(costs, limit, divides), most, host_limits(options, costs))
    comparison = Comparison(
        most_chunks(options.max_chunks, costs),
        limit,
        searched,
        not options.equal_passes,
        setup,
        moving,
        asks_to_divide(options),
        replicas_of(setup, costs, options.memory_limit, replicas(options)),
        rate,
    )
    listed, hidden = comparable([*without, *comparison.rows(costs)], options.all)
    rows, absent, best, break_even = _simulated(listed, limit, options.objective, comparison.replicas)
    with working("computing lower bounds"):
        bounds = comparison.bounds(costs, options.objective)
    sizes = options.objective, costs.num_ranks, costs.num_microbatches, limit
    sorted_rows = _with_speedups(rows, options.objective)
    gain = GainOverLayouts.of(sorted_rows, options.objective)
    table = Table(*sizes, bounds, sorted_rows, (*absent, *hidden), gain, break_even)
    costs = kinds[-1].costs
    if options.format == "json":
        return json.dumps(table.content, indent=2) + "\n"
    text = table_text(table, costs, about_limit)
    text += f"{sentence}\n" if (sentence := verdict(costs, options.objective)) else ""
    if best is None:
        return text
    timeline, candidate, row = best
    bound = " (a lower bound)" if costs.halves(timeline.schedule.placement) else ""
    uneven = imbalance_text(timeline, costs, by_cost, divides)
    run = how_to_run(options, candidate, timeline.schedule, row.needed_layout)
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
                contenders.add(made.untimed, f"{row.schedule} ({row.placement})", row.messages, ms)
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
        yield candidate, made, candidate.titled(made.timeline)  # here, costs refuse a schedule whose stages they lack

    yield from attempt(candidate.name, make)


def _row(
    timeline: Timeline, made: Answer, candidate: Candidate, limit: float, replicas: Replicas | None
) -> ComparedRow:
    schedule, costs, laid_out = timeline.schedule, made.costs, made.part(LayoutPlan)
    replicas = None if replicas is None else replace(replicas, count=replicas.count // (candidate.tensor_parallel or 1))
    total = [*rank_memory(timeline, costs)]
    if replicas is not None and replicas.counts_weights:
        _, static = replicas.bytes_of(made.parts, costs, schedule.placement)
        total = total if static is None else [peak + own for peak, own in zip(total, static, strict=True)]
    work, widths = Workload.of(schedule), costs.widths_on(schedule.placement)
    crossings = work.crossing(widths) if widths else work.crossings
    return ComparedRow(
        schedule=schedule.name,
        work=work,
        span_ms=timeline.span_ms,
        makespan_ms=timeline.makespan_ms,
        bubble_rate_span=timeline.bubble_rate("span"),
        bubble_rate_makespan=timeline.bubble_rate("makespan"),
        idle_rate_span=timeline.idle_rate("span"),
        idle_rate_makespan=timeline.idle_rate("makespan"),
        imbalance=timeline.imbalance,
        peak_microbatches=max(timeline.peak_activation),
        peak_memory=peak_memory(timeline, costs),
        messages=work.num_messages,
        message_bytes=None if costs.message_bytes is None else crossings * costs.message_bytes,
        speedup_over_1f1b=None,
        speedup_over_interleaved=None,
        within_limit=within(max(total), limit),
        layout=None if laid_out is None else laid_out.best.text,
        columns=columns_of(made, candidate, replicas),
        is_lower_bound=costs.halves(schedule.placement),
        needed_layout=costs.needed_layout(schedule.placement) if laid_out is None else None,
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


def _ratio(baseline: float | None, ms: float) -> float | None:
    return None if baseline is None or ms == 0 else baseline / ms

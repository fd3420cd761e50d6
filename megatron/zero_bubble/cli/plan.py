"""``zero-bubble plan``: one schedule, what it costs, and how far from the best it can be."""

from __future__ import annotations

import argparse
import math
import time

from megatron.zero_bubble.analysis.period import period_ms
from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.cli.figures import add_figures, figures
from megatron.zero_bubble.costs.units import refuse_huge
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.formats.plan import Certificate, plan_to_json, read_schedule_file
from megatron.zero_bubble.ir import Schedule
from megatron.zero_bubble.job.source import AUTO
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.plans import (
    ADAPTING,
    PlannedSchedule,
    auto,
    bound,
    fitted,
    limit_verdict,
    rank_memory,
)
from megatron.zero_bubble.render.svg import render_svg
from megatron.zero_bubble.render.text import headline, render_text
from megatron.zero_bubble.schedules import SCHEDULES, build
from megatron.zero_bubble.search.loops import compiled

_TEXT_WIDTH = 160
_SLOW = " by Python alone, which searches less; for its C++ part, install this again with pybind11 and a compiler"


def add_plan(verb: argparse.ArgumentParser) -> None:
    """The flags of ``plan``."""
    source = verb.add_mutually_exclusive_group(required=True)
    source.add_argument("--schedule", metavar="NAME", help=f"{AUTO}, or one of {', '.join(SCHEDULES)}")
    source.add_argument("--schedule-file", metavar="FILE", help="a schedule as JSON, in the form of --format json")
    add_figures(verb)
    add_search(verb)
    verb.add_argument("--num-chunks", type=int, metavar="V", help="stages a rank of interleaved schedules (default: 2)")
    verb.add_argument(
        "--equal-passes",
        action="store_true",
        help=f"{', '.join(ADAPTING)} as published, for passes of one length; else fitted to the costs",
    )
    verb.add_argument(
        "--step-ms", type=float, metavar="MS", help="of the optimizer step: show what an iteration takes with it"
    )
    verb.add_argument("--format", choices=("text", "json", "svg"), default="text", help="default: text")
    verb.set_defaults(command=plan)


def add_search(verb: argparse.ArgumentParser) -> None:
    """The flags that say what to look for."""
    verb.add_argument(
        "--memory-limit",
        metavar="LIMIT",
        help="what a rank may keep: 1p is as many microbatches as ranks, what 1F1B keeps; or 60GiB (zb-auto: 1p)",
    )
    verb.add_argument("--placement", choices=("linear", "vee", "auto"), help="of zb-auto's stages (default: auto)")
    verb.add_argument(
        "--objective",
        choices=("span", "makespan"),
        default="span",
        help="span when the optimizer waits for no other rank, makespan when it does (default: span)",
    )


def plan(options: argparse.Namespace) -> str:
    """The plan in the form asked for."""
    made = make_plan(options)
    timeline, costs, certificate = made.timeline, made.costs, made.certificate
    if options.format == "svg":
        return render_svg(timeline)
    if options.format == "json":
        return plan_to_json(timeline, certificate)
    text = _text(timeline, costs) + (_limit_text(timeline, costs, certificate) if certificate else "")
    return text if options.step_ms is None else text + _period_text(timeline, costs, options.step_ms)


def make_plan(options: argparse.Namespace) -> PlannedSchedule:
    """What the flags of ``plan`` ask for, as a value.

    Raises:
        UserError: for flags that do not go together, wrong figures, or a schedule that does not exist for them.
    """
    if options.schedule != AUTO and options.placement is not None:
        raise UserError(f"--placement belongs to {AUTO}; other schedules have one of their own; leave it out")
    if options.num_chunks is not None and options.schedule in (AUTO, None):
        raise UserError("--num-chunks belongs to interleaved schedules given by name; leave it out")
    if options.equal_passes and options.schedule not in ADAPTING:
        raise UserError(f"--equal-passes belongs to {', '.join(ADAPTING)}; leave it out")
    if options.step_ms is not None and not 0 <= options.step_ms < math.inf:
        raise UserError(f"--step-ms takes a time of 0 ms or more; got {options.step_ms}; give the optimizer step's")
    refuse_huge(**{"--step-ms": options.step_ms})
    file = None if options.schedule_file is None else read_schedule_file(options.schedule_file)
    costs = _figures_of(options, file)
    started = time.perf_counter()
    schedule = file or _build(options, costs)
    seconds = time.perf_counter() - started
    timeline = simulate(schedule, *costs.on(schedule.placement))
    certificate = None
    if options.schedule == AUTO or options.memory_limit is not None:
        certificate = _certify(options, costs, schedule, seconds)
    return PlannedSchedule(timeline, costs, certificate)


def searches(options: argparse.Namespace) -> bool:
    """Whether ``make_plan`` searches, a matter of seconds, or only builds what is known."""
    return options.schedule == AUTO or (options.schedule in ADAPTING and not options.equal_passes)


def _figures_of(options: argparse.Namespace, file: Schedule | None) -> Figures:
    if file is None:
        return figures(options)
    for flag, count, own in (
        ("--num-ranks", options.num_ranks, file.num_ranks),
        ("--num-microbatches", options.num_microbatches, file.num_microbatches),
    ):
        if count not in (None, own):
            raise UserError(f"{flag} must be what the schedule file says, {own}; got {count}; leave it out")
    return figures(options, file.num_ranks, file.num_microbatches)


def _build(options: argparse.Namespace, costs: Figures) -> Schedule:
    if options.schedule == AUTO:
        limit = costs.limit(options.memory_limit or "1p")
        return auto(costs, limit, options.placement or "auto", options.objective)
    sizes = {"num_ranks": costs.num_ranks, "num_microbatches": costs.num_microbatches}
    schedule = build(options.schedule, **sizes, num_chunks=options.num_chunks)
    return schedule if options.equal_passes else fitted(schedule, costs, options.objective)


def _certify(options: argparse.Namespace, costs: Figures, schedule: Schedule, seconds: float) -> Certificate:
    limit = costs.limit(options.memory_limit or "1p")
    best = bound(costs, schedule.placement, limit, options.objective)
    return Certificate(options.objective, limit, limit / costs.microbatch, best, seconds)


def _text(timeline: Timeline, costs: Figures) -> str:
    """The picture and a table with both bubble rates."""
    peaks = timeline.peak_activation
    listed = " ".join(f"{peak:.4g}" for peak in peaks)
    return (
        "".join(f"{note}\n" for note in costs.notes) + f"{headline(timeline)}\n\n{render_text(timeline, _TEXT_WIDTH)}\n"
        f"{'metric':10}{'ms':>12}{'bubble rate':>14}   measured from\n"
        f"{'span':10}{timeline.span_ms:12.3f}{timeline.bubble_rate('span'):14.4f}   "
        "a rank's first pass to its last, the longest rank: the optimizer does not wait for other ranks\n"
        f"{'makespan':10}{timeline.makespan_ms:12.3f}{timeline.bubble_rate('makespan'):14.4f}   "
        "the first pass of all to the last of all: the optimizer waits for every rank\n\n"
        f"peak activation {max(peaks):.4g} microbatches on a rank; by rank: {listed}\n{_bytes_by_rank(timeline, costs)}"
    )


def _bytes_by_rank(timeline: Timeline, costs: Figures) -> str:
    """What every rank needs in all, where that is known: on a V the first rank has both ends of the model."""
    if not costs.in_bytes:
        return ""
    placement = timeline.schedule.placement
    activations = rank_memory(timeline, costs)
    weights = costs.weight_bytes(placement) if costs.weight_bytes else (0.0,) * placement.num_ranks
    lines = [("activations", activations)]
    if costs.weight_bytes:
        lines += [("weights and optimizer", weights)]
        lines += [("together", tuple(a + w for a, w in zip(activations, weights, strict=True)))]
    return "".join(f"GiB by rank, {what}: {' '.join(f'{b / 2**30:.3g}' for b in row)}\n" for what, row in lines)


def _period_text(timeline: Timeline, costs: Figures, step_ms: float) -> str:
    """What training takes from one iteration to the next, by the kind of optimizer."""
    schedule = timeline.schedule
    on = costs.on(schedule.placement)[0]
    kinds = (("synchronous", False), ("with post-validation", True))
    periods = ((kind, period_ms(schedule, on, step_ms, ahead)) for kind, ahead in kinds)
    listed = ", ".join(f"{period:.3f} ms {kind}" for kind, period in periods)
    return f"iteration with an optimizer step of {step_ms:g} ms: {listed}\n"


def _limit_text(timeline: Timeline, costs: Figures, certificate: Certificate) -> str:
    """Whether the limit is kept, and how much better a schedule within it could be."""
    objective, best = certificate.objective, certificate.bound
    kept, verdict = limit_verdict(timeline, costs, certificate)
    lines = [verdict]
    where = best.reason if best.rank is None else f"{best.reason}, rank {best.rank}"
    lines.append(f"lower bound {best.value_ms:.3f} ms {objective}, for this placement and limit ({where})")
    if kept:
        lines.append(f"gap {certificate.gap(timeline):.2%}: no other schedule is shorter by more")
    lines.append(f"planned in {certificate.seconds:.2f} s{'' if compiled() else _SLOW}")
    return "\n".join(lines) + "\n"

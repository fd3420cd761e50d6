"""Schedules that hide the all-to-all of experts, and which of them is the shortest for given costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from megatron.zero_bubble.core.analysis.score import Goal, length_ms
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs.units import format_bytes
from megatron.zero_bubble.core.ir import Placement, Schedule
from megatron.zero_bubble.core.ir.sizes import check_size
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.core.schedules import SCHEDULES, build, recipe
from megatron.zero_bubble.core.schedules.alone import fuse_alone, split_alone
from megatron.zero_bubble.core.search.pairs import pairs_auto
from megatron.zero_bubble.core.search.placements import name_of
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.plans import peak_memory
from megatron.zero_bubble.planning.score import attempt
from megatron.zero_bubble.planning.setup import Named

WITH_PAIRS, WITH_OVERLAP = "with pairs", "with overlap"
"""The ends of names of schedules that hide the all-to-all of experts: in pairs, or beneath weight gradients only."""
_CHUNKS = (2, 4)
"""The stages per rank of the combined interleaved schedules that a sentence names."""


def hidden(costs: Figures, order: Named, named: Callable[[Named], Schedule], adapts: bool) -> Iterator[Schedule]:
    """Yield the ways to run a schedule so that the all-to-all of experts is hidden: in pairs, or else beneath weight
    gradients, as published and as refitted to the costs.

    Args:
        named: makes the schedule of a name without pairs.
        adapts: whether it can be refitted.

    Raises:
        UserError: for a schedule without pairs if the all-to-alls are unknown, because nothing is then gained.
    """
    known = recipe(order.name)
    known.pairs(not costs.has_all_to_alls)
    if known.has_pairs:
        own = costs.build(order.name, num_chunks=order.of_run, pairs=True)
        own = replace(own, name=f"{own.name} {WITH_PAIRS}")
        yield from dict.fromkeys((own, fuse_alone(own), split_alone(own)))
        return
    for schedule in map(named, (replace(order, equal_passes=True), *((order,) if adapts else ()))):
        own = replace(schedule, name=f"{schedule.name} {WITH_OVERLAP}", overlap_experts=True)
        yield from dict.fromkeys((fuse_alone(own), own))


def searched_pairs(costs: Figures, choices: Sequence[Placement], goal: Goal, effort: float = 1.0) -> Schedule:
    """Search for a schedule with pairs on the best of these placements; it is not longer than those by name there that
    are within the limit.
    """
    check_size(costs.num_ranks, costs.num_microbatches, max(on.num_stages for on in choices) // costs.num_ranks)
    known = [schedule for on in choices for schedule in _paired_on(costs, on)]
    found = pairs_auto(costs.on, choices, costs.num_microbatches, goal, known, effort)
    return replace(found, name=f"{found.name} {WITH_PAIRS}")


def _paired_on(costs: Figures, on: Placement) -> Iterator[Schedule]:
    """The schedules by name with pairs on a placement."""
    chunks = on.num_stages // on.num_ranks
    for known in SCHEDULES.values():
        count = chunks if known.shape == "interleaved" and chunks > 1 else None
        if known.has_pairs and known.placement(on.num_ranks, known.num_chunks(count)) == on:
            own = costs.build(known.name, num_chunks=count, pairs=True)
            yield from dict.fromkeys((own, fuse_alone(own), split_alone(own)))


def build_hiding(name: str, **sizes: Any) -> Schedule:
    """Build a schedule by name that hides the all-to-all of experts: in pairs, or else beneath weight gradients."""
    schedule = build(name, **sizes, pairs=recipe(name).has_pairs)
    return schedule if schedule.pairs else replace(fuse_alone(schedule), overlap_experts=True)


def kind_of(name: str, schedule: Schedule) -> tuple[str, str]:
    """Whether a schedule has pairs, and how a sentence names it."""
    if not schedule.pairs:
        return "plain", name
    is_megatrons = name.startswith("interleaved-1f1b") and name_of(schedule.placement) == "loop"
    return "pairs", combined_name(name) if is_megatrons else name


class Contender(NamedTuple):
    """A schedule of one kind.

    Attributes:
        what: what it is.
        ms: its length in milliseconds.
        peak: its activations on the fullest rank, as text.
    """

    what: str
    ms: float
    peak: str


def contenders(costs: Figures, objective: Metric) -> list[Contender]:
    """Megatron's combined interleaved schedule, pairs in DualPipeV's order, and a plain schedule, shortest first; none
    if the costs have no experts.
    """
    known = costs.of_ranks[0].experts
    if not known:
        return []
    layers = min(stage.layers for stage in known)

    def timed(what: str, *schedules: Schedule) -> Iterator[Contender]:
        for schedule in schedules:
            timeline = timeline_of(schedule, *costs.on(schedule.placement))
            peak = f"{max(timeline.peak_activation):.4g} microbatches"
            if costs.in_bytes:
                peak = format_bytes(peak_memory(timeline, costs))
            yield Contender(what, length_ms(timeline, objective), peak)

    combined = {
        combined_name(f"interleaved-1f1b x{chunks} {WITH_PAIRS}"): costs.build(
            "interleaved-1f1b", num_chunks=chunks, pairs=True
        )
        for chunks in _CHUNKS
        if layers >= chunks
    }
    dualpipe = costs.build("dualpipe-v", pairs=True)
    kinds = (
        [attempt(name, partial(timed, name, schedule)) for name, schedule in combined.items()],
        [attempt("pairs", partial(timed, f"dualpipe-v {WITH_PAIRS}", fuse_alone(dualpipe), split_alone(dualpipe)))],
        [attempt("plain", partial(timed, "zb-v without overlap", costs.build("zb-v")))],
    )
    # Costs of other stages than those of a schedule may not be divisible: it is left out.
    found = ([each for each in chain(*kind) if isinstance(each, Contender)] for kind in kinds)
    best = (min(own, key=lambda each: each.ms) for own in found if own)
    return sorted(best, key=lambda each: each.ms)


def combined_name(name: str) -> str:
    """The name of an interleaved schedule with pairs in a sentence."""
    return f"Megatron's combined schedule ({name})"


def verdict(costs: Figures, objective: Metric) -> str:
    """A sentence on the share of the all-to-all and on which kind of schedule is shortest; empty without experts."""
    return sentence(costs, objective, found) if (found := contenders(costs, objective)) else ""


def sentence(costs: Figures, objective: Metric, found: Sequence[Contender]) -> str:
    """The same for the schedules that are given, the shortest first."""
    text = f"all-to-all of experts: {costs.of_ranks[0].exposed_share:.0%} of a microbatch if nothing hides it"
    if not found:
        return text
    first, *others = (f"{each.what}: {each.ms:,.1f} ms, peak {each.peak}" for each in found)
    return "; ".join([text, f"shortest {objective}: {first}", *([f"then {'; '.join(others)}"] if others else [])])

"""Plan with vocabulary parallelism: which algorithm, and the schedule with the passes of its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import gt
from typing import Literal

from megatron.zero_bubble.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.costs.shards import divide, efficiency
from megatron.zero_bubble.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement, Schedule
from megatron.zero_bubble.ir.vocabulary import FLOWS, Algorithm, algorithm_of
from megatron.zero_bubble.plan.timelines import timeline_of
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.layouts import LayoutPlan
from megatron.zero_bubble.planning.plans import auto, fitted, peak_memory
from megatron.zero_bubble.planning.source import AUTO, DEFAULT_LIMIT, ScheduleSource
from megatron.zero_bubble.schedules import build
from megatron.zero_bubble.search.auto import PlacementChoice
from megatron.zero_bubble.search.vocabulary import best_with_vocabulary

Choice = Literal["off", "1", "2", "auto"]
CHOICES: tuple[Choice, ...] = ("off", "1", "2", "auto")
_KNOWN: dict[str, tuple[str, ...]] = {"linear": ("1f1b", "zb-h1"), "vee": ("zb-v", "v-half")}
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Variant:
    """The costs with one algorithm of vocabulary parallelism, or without it (None)."""

    algorithm: Algorithm | None
    costs: Figures


def variants(costs: Figures, choice: Choice | None, recompute_logits: bool = False) -> tuple[Variant, ...]:
    """Return the variants to choose from; more than one only for ``auto``, the default if the costs have S and T.

    Costs that have the times of S and T are without the embedding and the output layer, so they do not suit a job that
    does not divide these. From costs per layer, both can be derived.

    Raises:
        UserError: for ``off`` with the times of S and T, or another choice with neither these nor costs per layer.
    """
    given = costs.on(Placement.linear(costs.num_ranks))[0].vocabulary is not None
    if choice is None:
        choice = "auto" if given else "off"
    algorithms = [number for number in FLOWS if choice in ("auto", str(number))]
    if given:
        if choice == "off":
            raise UserError(
                "the costs have the times of S and T, so those of F, B and W are without the output layer and the "
                "embedding, and do not suit a job that does not divide them; leave out --vocabulary off, or S and T"
            )
        if recompute_logits:
            raise UserError("--recompute-logits changes only estimated times of S and T; the costs give them; drop it")
        return tuple(Variant(number, costs) for number in algorithms)
    without = [Variant(None, costs)] if choice in ("off", "auto") else []
    return (*without, *(Variant(number, _divided(costs, number, recompute_logits)) for number in algorithms))


def _divided(costs: Figures, algorithm: Algorithm, recompute_logits: bool) -> Figures:
    if costs.layers is None:
        raise UserError(
            "vocabulary parallelism needs the times of its passes; got costs without them; give --output-ms and "
            "--output-wgrad-ms, a costs file with output_ms and output_wgrad_ms or with costs per layer, or --config"
        )
    is_recorded = costs.division is not None and costs.division.given  # stages of equal layers differ by noise
    layers = costs.layers.averaged() if is_recorded else costs.layers
    shards = divide(layers, costs.num_ranks, algorithm, recompute_logits)

    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        times, memory = shards.layers.on(costs.layout(placement))
        times = replace(times, vocabulary=shards.vocabulary)
        if not costs.memory_given:
            return times, PassMemory.uniform(placement)
        return times, replace(memory, logits=shards.logits)

    share, uneven = efficiency(algorithm, costs.num_ranks), costs.layers.num_layers % costs.num_ranks
    note = (
        f"Vocabulary parallelism {algorithm}: the shards of the output layer are assumed to run at {share:.0%} of "
        "its throughput, as published for A100s; the layers are divided as Megatron does by default."
    )
    return replace(
        costs,
        on=on,
        notes=(*costs.notes, note),
        unit=costs.microbatch,
        weight_bytes=_mean(costs.weight_bytes) if costs.weight_bytes and not uneven else None,
    )


def _mean(weight_bytes: Callable[[Placement], tuple[float, ...]]) -> Callable[[Placement], tuple[float, ...]]:
    """The weights of equal parts of the layers and of the vocabulary on all ranks."""
    return lambda placement: (sum(weight_bytes(placement)) / placement.num_ranks,) * placement.num_ranks


@dataclass(frozen=True)
class Planned:
    """The shortest schedule of a variant, its costs, and the layouts that it was chosen from, if any."""

    timeline: Timeline
    costs: Figures
    layouts: LayoutPlan | None = None


def best_variant(
    choices: Sequence[Variant],
    make: Callable[[Variant], Iterable[Schedule]],
    limit: float | None,
    objective: Metric,
) -> Planned:
    """Return the best over all schedules that ``make`` gives for the variants.

    The best is the shortest within the limit; if none is within it, the one with the smallest peak.

    Args:
        make: schedules without vocabulary passes, which are inserted, or with those of the variant's algorithm.
    """
    return best_of(of_variants(choices, make, limit, objective), limit, objective)


def best_of(found: Iterable[Planned], limit: float | None, objective: Metric) -> Planned:
    """Return the shortest within the limit; if none is within it, the one with the smallest peak."""
    return min(found, key=lambda planned: _value(planned, limit, objective))


def of_variants(
    choices: Sequence[Variant],
    make: Callable[[Variant], Iterable[Schedule]],
    limit: float | None,
    objective: Metric,
) -> Iterator[Planned]:
    """Yield all schedules from which ``best_variant`` takes one, each with the costs of its variant."""
    for variant in choices:
        for schedule in make(variant):
            yield Planned(inserted(schedule, variant, limit, objective), variant.costs)


def inserted(schedule: Schedule, variant: Variant, limit: float | None, objective: Metric) -> Timeline:
    """Insert the passes of the variant's algorithm into ``schedule``, unless it has passes of the vocabulary."""
    on = variant.costs.on(schedule.placement)
    if variant.algorithm is None or algorithm_of(schedule) is not None:
        return timeline_of(schedule, *on)
    best = best_with_vocabulary(schedule, *on, variant.algorithm, objective, limit)
    return timeline_of(best.schedule, *on)


def shards_inserted(
    make: Callable[[], Iterable[Schedule]], variant: Variant, limit: float, objective: Metric
) -> Schedule:
    """Return the best of the schedules that ``make`` gives, with the passes of the variant."""
    return best_variant([variant], lambda _: make(), limit, objective).timeline.schedule


def searched(variant: Variant, limit: float, placement: PlacementChoice, objective: Metric) -> Iterator[Schedule]:
    """Search for schedules into which the passes of the vocabulary are inserted.

    An insertion needs up to one more microbatch of memory per barrier, so there is one search with the limit, one with
    so much less, and the known schedules.

    Raises:
        UserError: when the limit admits no schedule.
    """
    costs = variant.costs
    yield auto(costs, limit, placement, objective)
    if variant.algorithm is None:
        return
    names: tuple[PlacementChoice, ...] = ("linear", "vee") if placement == "auto" else (placement,)
    barriers = 2 if variant.algorithm == 1 else 1
    for name in names:
        less = limit - barriers * max(costs.on(Placement.linear(costs.num_ranks))[1].activation)
        with suppress(UserError):  # no schedule may be within so much less
            yield auto(costs, less, name, objective)
        yield from known_schedules(costs, name, objective)


def known_schedules(costs: Figures, placement: PlacementChoice, objective: Metric) -> Iterator[Schedule]:
    """The schedules that a search also tries where it does not know what follows: passes of the vocabulary that are
    inserted, or activations that move to host memory.
    """
    for name in ("linear", "vee") if placement == "auto" else (placement,):
        for known in _KNOWN[name]:
            schedule = build(known, num_ranks=costs.num_ranks, num_microbatches=costs.num_microbatches)
            yield replace(fitted(schedule, costs, objective), name=AUTO)


def auto_with_vocabulary(
    costs: Figures, algorithm: Algorithm, memory_limit: str, placement: Literal["linear", "vee"], objective: Metric
) -> Schedule:
    """Plan for a run: the shortest of its first schedule and of those that ``searched`` finds, within the memory limit.

    If no schedule is within the limit, the result is the one with the smallest peak. The default limit is the peak of
    the first schedule, because that of 1F1B leaves no room for the microbatches between the barriers.

    Args:
        costs: with the times of the passes of the vocabulary.
    """
    variant, limit = Variant(algorithm, costs), costs.limit(memory_limit)
    memory = costs.on(Placement.linear(costs.num_ranks))[1]
    grows = any(map(gt, memory.wgrad, memory.activation))
    source = ScheduleSource.automatic(placement, costs.num_ranks, vocabulary=algorithm, fused=grows)
    first = replace(source.make(costs.num_microbatches), name=f"{AUTO} (vocabulary {algorithm})")
    if memory_limit == DEFAULT_LIMIT:
        limit = max(limit, peak_memory(timeline_of(first, *costs.on(first.placement)), costs))
    found = searched(variant, limit, placement, objective)
    return shards_inserted(lambda: (first, *found), variant, limit, objective)


def with_times(costs: Figures, times: VocabularyCosts) -> Figures:
    """Return the costs with these times of the passes of the vocabulary."""

    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        passes, memory = costs.on(placement)
        return replace(passes, vocabulary=times), memory

    return replace(costs, on=on)


def _value(planned: Planned, limit: float | None, objective: Metric) -> tuple[float, float]:
    timeline = planned.timeline
    ms = timeline.makespan_ms if objective == "makespan" else timeline.span_ms
    if limit is not None and (peak := peak_memory(timeline, planned.costs)) > limit * (1 + _ROUNDING):
        return peak, ms
    return 0.0, ms

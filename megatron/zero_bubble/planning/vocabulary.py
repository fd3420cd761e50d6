"""Plan with vocabulary parallelism: which algorithm, and the schedule with the passes of its shards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from megatron.zero_bubble.core.analysis.bounds import least_memory
from megatron.zero_bubble.core.analysis.score import Goal, within
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.divided_vocabulary import divide, efficiency
from megatron.zero_bubble.core.costs.even import even_costs
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement, Schedule
from megatron.zero_bubble.core.ir.vocabulary import FLOWS, Algorithm, Divided, algorithm_of
from megatron.zero_bubble.core.schedules import ZB_AUTO
from megatron.zero_bubble.core.search.placements import Placements, name_of, placements
from megatron.zero_bubble.core.search.vocabulary import best_with_vocabulary
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.plans import auto, fitted
from megatron.zero_bubble.planning.setup import Auto, Setup
from megatron.zero_bubble.planning.weights import DividedWeights

VocabularyChoice = Literal["off", "1", "2", "auto"]
CHOICES: tuple[VocabularyChoice, ...] = ("off", "1", "2", "auto")
_ALGORITHMS: dict[str, Algorithm | Auto] = {"1": 1, "2": 2, "auto": "auto"}
_OPEN = Divided("auto")
_KNOWN: dict[str | None, tuple[str, ...]] = {
    "linear": ("1f1b", "zb-h1"),
    "vee": ("zb-v", "v-half"),
    "loop": ("interleaved-1f1b", "zb-interleaved"),
}
"""The schedules that a search also tries, by placement."""


@dataclass(frozen=True)
class Variant:
    """The costs with one algorithm of vocabulary parallelism, or without it (None)."""

    divided: Divided | None
    costs: Figures

    @property
    def algorithm(self) -> Algorithm | None:
        """That of vocabulary parallelism; None without it."""
        return None if self.divided is None else self.divided.of_run


def are_divided(costs: Figures) -> bool:
    """Whether the costs have the times of S and T, so that those of F, B and W are without the vocabulary."""
    return costs.of_ranks[0].vocabulary is not None


def divided_by(costs: Figures, choice: VocabularyChoice | None, asked: Divided = _OPEN) -> Divided | None:
    """How a choice of ``plan`` divides the vocabulary; by default, ``auto`` if the costs have S and T, else not at all.

    Costs that have the times of S and T are without the embedding and the output layer, so they do not suit a job that
    does not divide these. From costs per layer, both can be derived.

    Args:
        asked: what else than the algorithm is chosen.

    Raises:
        UserError: for ``off`` with the times of S and T, or logits that nobody or only a measurement recomputes.
    """
    given = are_divided(costs)
    if choice is None:
        choice = "auto" if given else "off"
    if given and choice == "off":
        raise UserError(
            "the costs have the times of S and T, so those of F, B and W are without the output layer and the "
            "embedding, and do not suit a job that does not divide them; leave out --vocabulary off, or S and T"
        )
    if given and asked != _OPEN:
        raise UserError("--recompute-logits changes only estimated times of S and T; the costs give them; drop it")
    if asked != _OPEN and choice == "off":
        raise UserError("--recompute-logits applies only to --vocabulary 1, 2 or auto; leave it out")
    return None if choice == "off" else replace(asked, algorithm=_ALGORITHMS[choice])


def divided_in(schedule: Schedule, setup: Setup) -> Divided | None:
    """How a schedule of a setup divides the vocabulary; None if it does not."""
    algorithm = algorithm_of(schedule)
    return None if algorithm is None else replace(setup.vocabulary or Divided(algorithm), algorithm=algorithm)


def variants(costs: Figures, divided: Divided | None) -> tuple[Variant, ...]:
    """Return the variants to choose from; more than one only for ``auto``, which is also without vocabulary parallelism
    for costs that have no times of S and T.

    Raises:
        UserError: as ``divided_costs``.
    """
    if divided is None:
        return (Variant(None, costs),)
    is_open, given = divided.algorithm == "auto", are_divided(costs)
    choices = [replace(divided, algorithm=number) for number in FLOWS if is_open or number == divided.algorithm]
    whole = [Variant(None, costs)] if is_open and not given else []
    return (*whole, *(Variant(each, costs if given else divided_costs(costs, each)) for each in choices))


def variants_of(setup: Setup, costs: Figures) -> tuple[Variant, ...]:
    """Those of a setup."""
    return variants(costs, setup.vocabulary)


def costs_of_run(costs: Figures, setup: Setup) -> Figures:
    """The costs of a job with a setup; without the times of its passes, they stay those of a whole vocabulary."""
    divided = setup.vocabulary
    return costs if divided is None or costs.layers is None or are_divided(costs) else divided_costs(costs, divided)


def divided_costs(costs: Figures, divided: Divided) -> Figures:
    """The costs of a job that divides its vocabulary so.

    Raises:
        UserError: costs with neither the times of S and T nor costs per layer.
    """
    algorithm = divided.of_run
    if costs.layers is None:
        raise UserError(
            "vocabulary parallelism needs the times of its passes; got costs without them; give --output-ms and "
            "--output-wgrad-ms, a costs file with output_ms and output_wgrad_ms or with costs per layer, or --config"
        )
    is_recorded = costs.division is not None and costs.division.given  # stages of equal layers differ by noise
    layers = costs.layers.averaged() if is_recorded else costs.layers
    layers = divide(layers, costs.num_ranks, divided)

    def make(placement: Placement) -> tuple[PassCosts, PassMemory]:
        times, memory = layers.on(costs.layout(placement))
        return times, memory if costs.memory_given else PassMemory.uniform(placement)

    share = efficiency(algorithm, costs.num_ranks)
    note = (
        f"Vocabulary parallelism {algorithm}: the shards of the output layer are assumed to run at {share:.0%} of "
        "its throughput, as published for A100s; the layers are divided as Megatron does by default."
    )
    return replace(
        costs,
        make=make,
        layers=layers,
        notes=(*costs.notes, note),
        base=costs.base or costs,
        weights=None if costs.weights is None else DividedWeights(costs.weights.without_copies()),
    )


def inserted(schedule: Schedule, variant: Variant, goal: Goal) -> Schedule:
    """Insert the passes of the variant's algorithm into ``schedule``, unless it has passes of the vocabulary."""
    if variant.algorithm is None or algorithm_of(schedule) is not None:
        return schedule
    on = variant.costs.on(schedule.placement)
    return best_with_vocabulary(schedule, *on, variant.algorithm, goal)


@cache
def inserted_evenly(schedule: Schedule, algorithm: Algorithm) -> Schedule:
    """Insert the passes of an algorithm as is best for passes of equal length."""
    memory = PassMemory.uniform(schedule.placement)
    return best_with_vocabulary(schedule, even_costs(schedule.placement), memory, algorithm)


def searched(variant: Variant, placement: Placements, goal: Goal, effort: float = 1.0) -> Iterator[Schedule]:
    """Search for schedules into which the passes of the vocabulary are inserted.

    An insertion needs up to one more microbatch of memory per barrier, so there is one search with the limit, one with
    so much less, and the known schedules.

    Raises:
        UserError: when the limit admits no schedule.
    """
    costs = variant.costs
    yield auto(costs, placement, goal, effort=effort)
    if variant.algorithm is None:
        return
    barriers = 2 if variant.algorithm == 1 else 1
    for on in placements(placement, costs.num_ranks):
        memory = costs.on(on)[1]
        ranks = map(on.stages_of, range(on.num_ranks))
        less = goal.most - barriers * max(math.fsum(memory.activation[stage] for stage in stages) for stages in ranks)
        if within(max(least_memory(memory, on, fused=True)), less):
            yield auto(costs, (on,), replace(goal, limit=less), effort=effort)
        yield from known_schedules(costs, (on,), goal.objective)


def known_schedules(costs: Figures, placement: Placements, objective: Metric) -> Iterator[Schedule]:
    """The schedules that a search also tries where it does not know what follows: passes of the vocabulary that are
    inserted, or activations that move to host memory.
    """
    for on in placements(placement, costs.num_ranks):
        for known in _KNOWN.get(name_of(on), ()):
            schedule = costs.build(known, num_chunks=on.num_stages // on.num_ranks)
            yield replace(fitted(schedule, costs, objective), name=ZB_AUTO)

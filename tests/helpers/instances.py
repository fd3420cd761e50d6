"""Random pipelines and schedules: placement, costs per stage and link, memory, and order."""

from __future__ import annotations

import random
from dataclasses import dataclass

from megatron.zero_bubble import Kind, Pass, PassCosts, PassMemory, Placement, Schedule, simulate

_CHOICE = 12
"""Number of ready passes from which a random schedule picks its next pass."""


@dataclass(frozen=True)
class Instance:
    """A pipeline and a memory limit in the unit of ``memory``."""

    placement: Placement
    costs: PassCosts
    memory: PassMemory
    num_microbatches: int


def random_placement(rng: random.Random, most_ranks: int) -> Placement:
    """Draw a placement: linear, V, interleaved, or stages on random ranks."""
    p = rng.randint(1, most_ranks)
    shape = rng.randrange(4)
    if shape == 0:
        return Placement.linear(p)
    if shape == 1:
        return Placement.vee(p)
    if shape == 2:
        return Placement.interleaved(p, rng.randint(2, 3))
    ranks = [*range(p), *(rng.randrange(p) for _ in range(rng.randint(0, p)))]
    rng.shuffle(ranks)
    return Placement(tuple(ranks))


def random_instance(
    rng: random.Random, most_ranks: int = 6, most_microbatches: int = 12, whole: bool = False
) -> Instance:
    """Draw a pipeline with equal or unequal stages; ``whole`` draws integers, for integer solvers."""
    placement = random_placement(rng, most_ranks)
    n = placement.num_stages

    def figures(low: float, high: float) -> tuple[float, ...]:
        def draw() -> float:
            return float(rng.randint(round(low), round(high))) if whole else rng.uniform(low, high)

        return (draw(),) * n if rng.random() < 0.4 else tuple(draw() for _ in range(n))

    links = {}
    if rng.random() < 0.3:
        ranks = range(placement.num_ranks)
        links = {(rng.choice(ranks), rng.choice(ranks)): float(rng.randint(0, 30)) for _ in range(3)}
    slow = rng.choice((0, 1, 5))
    costs = PassCosts(figures(1, 12), figures(1, 12), figures(0 if not whole else 1, 12), float(slow), links)
    activation = figures(2, 10)
    wgrad = tuple(a * rng.choice((0.0, 0.5, 1.0)) for a in activation) if rng.random() < 0.75 else figures(1, 12)
    return Instance(placement, costs, PassMemory(activation, wgrad), rng.randint(1, most_microbatches))


def random_schedule(rng: random.Random, instance: Instance, fused: bool = False) -> Schedule:
    """Draw a valid order: greedy in time with random preferences; microbatches may overtake each other."""
    placement, costs, m = instance.placement, instance.costs, instance.num_microbatches
    names = [Kind.F, Kind.BW] if fused else [Kind.F, Kind.B, Kind.W]
    every = [Pass(s, k, j) for s in range(placement.num_stages) for k in names for j in range(m)]
    # dependencies() detects fused backwards from the passes present; their order does not matter.
    rows = tuple(tuple(p for p in every if placement.stage_to_rank[p.stage] == r) for r in range(placement.num_ranks))
    unordered = Schedule("random", placement, m, rows)
    taste = {kind: rng.choice((0.0, 10.0, 200.0)) for kind in names}
    noise, orderly = rng.choice((0.0, 3.0, 100.0)), rng.random() < 0.7
    free = [0.0] * placement.num_ranks
    end: dict[Pass, float] = {}
    order: list[list[Pass]] = [[] for _ in free]
    waiting = {p: len(unordered.dependencies(p)) for p in every}
    after: dict[Pass, list[Pass]] = {}
    for p in every:
        for d in unordered.dependencies(p):
            after.setdefault(d, []).append(p)
    ready = [p for p in every if waiting[p] == 0]

    def start(p: Pass) -> float:
        rank = placement.stage_to_rank[p.stage]
        arrivals = [end[d] + costs.comm(placement.stage_to_rank[d.stage], rank) for d in unordered.dependencies(p)]
        return max([free[rank], *arrivals])

    while ready:
        p = min(
            rng.sample(ready, min(_CHOICE, len(ready))),
            key=lambda p: start(p) + taste[p.kind] + rng.random() * noise + (p.microbatch if orderly else 0) * 1e-3,
        )
        rank = placement.stage_to_rank[p.stage]
        free[rank] = end[p] = start(p) + costs.duration(p)
        order[rank].append(p)
        ready.remove(p)
        for n in after.get(p, ()):
            waiting[n] -= 1
            if not waiting[n]:
                ready.append(n)
    return Schedule("random", placement, m, tuple(map(tuple, order)))


def peak_memory(schedule: Schedule, instance: Instance) -> float:
    """Return the largest activation memory of any rank, in the unit of the instance's memory."""
    peaks = simulate(schedule, instance.costs, instance.memory).peak_activation
    whole = [sum(instance.memory.activation[s] for s in schedule.placement.stages_of(r)) for r in range(len(peaks))]
    return max(peak * one for peak, one in zip(peaks, whole, strict=True))

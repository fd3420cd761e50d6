"""The choice of units, whole stages and stages per rank, against every combination of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, PassMemory, Schedule, build
from megatron.zero_bubble.core.analysis.score import SHORTEST
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.plan.shard import Sharding
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.plans import bound
from megatron.zero_bubble.planning.shard_search import plan_shards
from megatron.zero_bubble.planning.shards import Replicas, ShardPlan, least_ms, of_schedule, with_collectives
from tests.helpers.equal_weights import EqualStages

REPLICAS, ROUNDING = 4, 1 + 1e-9


def figures(p: int, m: int, parameters: float, gather_ms: float, reduce_ms: float, backward_ms: float = 4.0) -> Figures:
    """Memory in microbatches; a rank has ``parameters`` of them as parameters, with 18 bytes for each."""

    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        return PassCosts.uniform(placement, 4.0, backward_ms, 4.0, 0.5), PassMemory.uniform(placement, 1.0, 0.9)

    weights = EqualStages(lambda placement: parameters * p / placement.num_stages)
    return with_collectives(Figures(p, m, on, weights=weights), REPLICAS, gather_ms, reduce_ms, None)


def maker(name: str, p: int, m: int, chunks: int) -> Callable[[int | None], Schedule]:
    sizes = {"num_ranks": p, "num_microbatches": m}
    return lambda unit: build(name, **sizes, num_chunks=chunks, unit_microbatches=unit)


def rated(plan: ShardPlan) -> tuple[float, float, int]:
    return plan.timeline.makespan_ms, max(plan.peaks), max(plan.gathers)


def test_fewest_gathers_of_equal_plans() -> None:
    """One rank has no bubble, and keeps all microbatches, however many stages it has."""
    costs = replace(figures(1, 4, 0.3, 0.0, 0.0), weights=None)
    makers = [maker("zero-pp", 1, 4, chunks) for chunks in (4, 2, 3)]
    found = plan_shards(costs, makers, True, Replicas(REPLICAS, 4, 2))
    assert found.timeline.schedule.num_stages == 2 and max(found.gathers) == 2


@settings(max_examples=12)
@given(
    p=st.integers(2, 4),
    m=st.integers(2, 9),
    chunks=st.lists(st.integers(2, 4), min_size=1, max_size=2, unique=True),
    has_units=st.booleans(),
    parameters=st.sampled_from([0.05, 0.3]),
    collectives=st.tuples(st.sampled_from([1.0, 6.0, 20.0]), st.sampled_from([0.0, 9.0])),
    backward_ms=st.sampled_from([3.0, 8.0]),
    limit=st.sampled_from([math.inf, 9.0, 6.0, 4.0, 0.5]),
)
def test_best_of_all_combinations(
    p: int,
    m: int,
    chunks: list[int],
    has_units: bool,
    parameters: float,
    collectives: tuple[float, float],
    backward_ms: float,
    limit: float,
) -> None:
    costs = figures(p, m, parameters, *collectives, backward_ms)
    makers = [maker("zero-pp" if has_units else "interleaved-1f1b", p, m, count) for count in chunks]
    found = plan_shards(costs, makers, has_units, Replicas(REPLICAS, None, None, limit))
    sizes = {-(-m // units) for units in range(1, max(1, m // p) + 1)} | (
        set() if limit == math.inf else {*range(1, p)}
    )
    plans = [
        of_schedule(costs, make(unit if has_units else None), Sharding(unit, whole), REPLICAS)
        for make, unit in product(makers, sizes if has_units else [p])
        for whole in range(1, max(chunks) + 1)
    ]
    within = [rated(each) for each in plans if max(each.peaks) <= limit * ROUNDING]
    ms, peak, _ = rated(found)
    if not within:
        assert peak == pytest.approx(min(max(each.peaks) for each in plans))
        return
    shortest = min(each[0] for each in within) * ROUNDING
    assert ms <= shortest and peak <= limit * ROUNDING
    assert peak <= min(each[1] for each in within if each[0] <= shortest) * ROUNDING


@pytest.mark.parametrize("collectives", [(3.0, 5.0), (200.0, 300.0)])
def test_no_units_are_shorter_than_the_bound(collectives: tuple[float, float]) -> None:
    """The longer collectives take more time than the passes, even once per stage."""
    p, m, v = 3, 6, 3
    costs, make = figures(p, m, 0.05, *collectives), maker("zero-pp", p, m, v)
    on = make(None).placement
    passes_ms = bound(costs, Workload(on, costs.num_microbatches), SHORTEST).value_ms
    least, why = least_ms(costs.on(on)[0], on, passes_ms)
    assert why.startswith("the passes" if collectives[0] < 100 else "one gather")
    plans = (of_schedule(costs, make(u), Sharding(u, k), REPLICAS) for u, k in product((1, 3, 6), (1, 3)))
    assert passes_ms < least <= min(plan.timeline.makespan_ms for plan in plans) * ROUNDING


def test_a_tight_limit_takes_fewer_whole_stages_or_smaller_units() -> None:
    p, m, v = 4, 16, 4
    costs = figures(p, m, 0.3, 12.0, 12.0)
    plan = partial(plan_shards, costs, [maker("zero-pp", p, m, v)], True)
    free = plan(Replicas(REPLICAS, None, None))
    tight = plan(Replicas(REPLICAS, None, None, max(free.peaks) - 0.1))
    assert max(tight.peaks) < max(free.peaks) and tight.timeline.makespan_ms > free.timeline.makespan_ms
    assert (tight.sharding.open_chunks, tight.sharding.unit_microbatches) != (
        free.sharding.open_chunks,
        free.sharding.unit_microbatches,
    )


@pytest.mark.parametrize(("limit", "whole"), [(math.inf, 2), (8.5, 2), (7.8, 1)])
def test_whole_stages_without_times_of_gathers(limit: float, whole: int) -> None:
    """All numbers take as long then: two, or one if two do not fit."""
    costs = figures(4, 16, 0.3, 0.0, 0.0)
    plan = plan_shards(costs, [maker("zero-pp", 4, 16, 4)], True, Replicas(REPLICAS, 4, None, limit))
    assert plan.sharding.open_chunks == whole


def test_without_sizes_the_fewest_whole_stages_that_hide_gathers() -> None:
    """A run of four forwards takes 4 ms: two whole stages hide gathers of 4 ms, one hides none."""
    costs = figures(4, 16, 0.3, 16.0, 0.0)
    unsized = Figures(costs.num_ranks, costs.num_microbatches, costs.on)
    plan = plan_shards(unsized, [maker("zero-pp", 4, 16, 4)], True, Replicas(REPLICAS, 4, None))
    assert plan.sharding.open_chunks == 2

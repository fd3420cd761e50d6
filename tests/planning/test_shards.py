"""Plans of sharded units: the size of units, memory, traffic, and the times of the collectives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Schedule, build
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.plan.shard import Sharding
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.shard_search import plan_shards
from megatron.zero_bubble.planning.shards import Replicas, of_schedule, with_collectives
from megatron.zero_bubble.planning.unit_sizes import best_within, smallest, unit_sizes
from tests.helpers.equal_weights import EqualStages

P, V, M = 8, 4, 32
PARAMETERS = 1000.0


def figures(wgrad_memory: float = 1.0) -> Figures:
    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        return PassCosts.uniform(placement, 4.0, 4.0, 4.0), PassMemory.uniform(placement, 1.0, wgrad_memory)

    return Figures(P, M, on, weights=EqualStages(lambda _: PARAMETERS), counts_weights=False)


def units(size: int | None) -> Schedule:
    return build("zero-pp", num_ranks=P, num_microbatches=M, num_chunks=V, unit_microbatches=size)


def test_sizes_are_equal_parts_that_fill_the_pipeline() -> None:
    assert unit_sizes(8, 32) == [8, 11, 16, 32]
    assert unit_sizes(8, 12) == [12]
    assert unit_sizes(8, 3) == [3]


def test_smallest_size_that_is_as_short_as_one_unit() -> None:
    lengths = {4: 10.0, 5: 9.0, 8: 8.0, 16: 9.0}
    assert smallest([4, 5, 8, 16], lengths.__getitem__) == 5
    assert smallest([16], lengths.__getitem__) == 16


@pytest.mark.parametrize(
    ("limit", "size"),
    [(math.inf, 8), (16.0, 8), (7.9, 6), (0.5, 1)],
)
def test_shortest_within_the_limit(limit: float, size: int) -> None:
    """Without room for a microbatch per rank, units are smaller than the pipeline, and wait; else the least memory."""

    def rated(unit: int) -> tuple[float, float]:
        return (100.0 if unit >= 8 else 101.0 if unit >= 6 else 200.0), float(unit)

    assert best_within(8, 32, lambda unit: unit, rated, limit) == size


def test_static_memory_and_traffic_of_one_unit() -> None:
    """Shards of everything, and weights and gradients of two of four chunks; a gather of the chunk where F turns to B,
    and of one more, is left out.
    """
    replicas, of = 4, PARAMETERS * V
    plan = of_schedule(figures(), units(M), Sharding(M), replicas)
    assert plan.gathers == (2 * V - 2,) * P and plan.reductions == (V,) * P
    assert plan.static == pytest.approx((18 * of / replicas + 2 * (2 + 4) * PARAMETERS,) * P)
    sent = (2 * (2 * V - 2) + 4 * V) * PARAMETERS * (replicas - 1) / replicas
    assert plan.traffic == pytest.approx((sent,) * P)
    assert plan.activations == pytest.approx((M,) * P)


def test_published_row_is_planned() -> None:
    """8 ranks, 4 chunks, 32 microbatches: idle for 3.5 forwards of a rank, within 12 microbatches."""
    plan = plan_shards(replace(figures(), weights=None), [units], True, Replicas(4))
    assert plan.sharding.unit_microbatches == 8
    work = M * 12.0
    assert plan.timeline.makespan_ms - work == pytest.approx(3.5 * 4.0)
    assert max(plan.activations) <= 12.0


@pytest.mark.parametrize(
    ("given", "gather", "reduce"),
    [((8.0, None, None), 2.0, 0.0), ((None, 12.0, None), 0.0, 3.0), ((None, None, 750.0), 2.0, 4.0)],
)
def test_times_of_collectives(given: tuple[float, float, float], gather: float, reduce: float) -> None:
    """Times are given for all stages of a rank, or by the bandwidth in bytes per ms: 3/4 of a size are sent."""
    costs = with_collectives(figures(), 4, *given)
    times, _ = costs.on(Placement.interleaved(P, V))
    assert times.gather_ms == pytest.approx((gather,) * P * V)
    assert times.reduce_ms == pytest.approx((reduce,) * P * V)


def test_long_collectives_ask_for_larger_units() -> None:
    def plan(gather_ms: float) -> int:
        costs = with_collectives(replace(figures(), weights=None), 4, gather_ms, gather_ms, None)
        return plan_shards(costs, [units], True, Replicas(4)).sharding.unit_microbatches

    assert plan(4.0) == 8
    assert plan(80.0) > 8


def test_hidden_gathers_cost_nothing() -> None:
    """A gather that is shorter than a run of F's is hidden: the span is that of free gathers, on every rank."""
    run_ms = 8 * 4.0 / V

    def spans(gather_ms: float) -> float:
        costs = with_collectives(figures(), 4, V * gather_ms, None, None)
        return of_schedule(costs, units(8), Sharding(8), 4).timeline.span_ms

    assert spans(run_ms) == spans(0.0)
    assert spans(2 * run_ms) > spans(0.0)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: of_schedule(figures(), build("zb-h1", num_ranks=P, num_microbatches=M), Sharding(8), 4), "2 or more"),
        (lambda: with_collectives(Figures(P, M, figures().on), 4, None, None, 1.0), "needs the size of the weights"),
    ],
)
def test_rejected(make: Callable[[], object], what: str) -> None:
    with pytest.raises(UserError, match=what):
        make()


def test_first_gather_counts_in_the_iteration() -> None:
    """The weights of the first stage are gathered before any pass."""

    def makespan_ms(gather_ms: float) -> float:
        costs = with_collectives(figures(), 4, V * gather_ms, None, None)
        return of_schedule(costs, units(8), Sharding(8), 4).timeline.makespan_ms

    assert makespan_ms(3.0) == pytest.approx(makespan_ms(0.0) + 3.0)

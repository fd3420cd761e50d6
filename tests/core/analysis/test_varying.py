"""The makespan of microbatches that take different times: that of the simulation of the whole timeline."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import LengthCost, build, simulate
from megatron.zero_bubble.core.analysis.varying import Varying
from megatron.zero_bubble.core.costs.lengths import Load
from megatron.zero_bubble.planning.ordering import Simulator, orders

lists = st.lists(st.integers(1, 4096), min_size=1, max_size=20)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe-v"])
@settings(max_examples=15)
@given(lists, st.integers(1, 4))
def test_the_makespan_is_that_of_the_whole_timeline(name: str, lengths: list[int], num_ranks: int) -> None:
    schedule = build(name, num_ranks=num_ranks, num_microbatches=len(lengths))
    costs = LengthCost(1.0, 0.001, 7.0).passes(schedule.placement, tuple(Load.of([tokens]) for tokens in lengths))
    assert Varying.of(schedule).makespan(costs, costs.loads) == pytest.approx(
        simulate(schedule, costs).makespan_ms, rel=1e-12
    )


@settings(max_examples=30)
@given(lists)
def test_the_orders_are_permutations_and_the_best_is_taken(lengths: list[int]) -> None:
    cost, loads = LengthCost(1.0, 0.001), [Load.of([tokens]) for tokens in lengths]
    simulator = Simulator(lambda count: build("zb-v", num_ranks=3, num_microbatches=count), cost)
    found = orders(loads, cost)
    assert found[0] == list(range(len(loads))) and all(sorted(order) == found[0] for order in found)
    times = [simulator.makespan([loads[at] for at in order]) for order in found]
    assert simulator.best(loads) == (min(times), found[times.index(min(times))])


def test_short_microbatches_are_at_both_ends_of_a_mountain() -> None:
    loads = [Load.of([tokens]) for tokens in (50, 10, 40, 30, 20)]
    assert orders(loads, LengthCost(1.0)) == [[0, 1, 2, 3, 4], [1, 4, 3, 2, 0], [1, 3, 0, 2, 4]]


def test_a_simulator_keeps_a_limited_number_of_schedules() -> None:
    made = []

    def make(count: int):  # type: ignore[no-untyped-def]
        made.append(count)
        return build("1f1b", num_ranks=1, num_microbatches=count)

    simulator = Simulator(make, LengthCost(1.0), most_kept=2)
    for count in (1, 2, 1, 3, 1, 2):
        simulator.makespan([Load(1, 1)] * count)
    assert made == [1, 2, 3, 2], "the last used ones are kept"

"""No plan is below the bounds, and on a V with equal passes they equal the length of V-Half."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron.zero_bubble import SCHEDULES, PassCosts, PassMemory, Placement, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.bounds import least_memory, lower_bound
from megatron.zero_bubble.core.analysis.bounds.room import time_to_make_room
from megatron.zero_bubble.core.analysis.bounds.setting import Setting
from megatron.zero_bubble.core.analysis.bounds.ways import by_ways
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search import zb_auto
from tests.helpers.instances import Instance, peak_memory, random_schedule

LITTLE = 0.01


def random_pipeline(rng: random.Random, placement: Placement) -> Instance:
    """Draw costs and memory, equal for all stages or not, and up to 20 microbatches."""
    n, equal = placement.num_stages, rng.random() < 0.6

    def figures(low: float, high: float) -> tuple[float, ...]:
        return (rng.uniform(low, high),) * n if equal else tuple(rng.uniform(low, high) for _ in range(n))

    links = {}
    if rng.random() < 0.2:
        links = {(0, placement.num_ranks - 1): rng.uniform(0, 30), (1, 0): rng.uniform(0, 30)}
    times = [figures(1, 12), figures(1, 12), figures(0, 12)]
    if rng.random() < 0.2:
        times = [tuple(float(round(ms)) for ms in row) for row in times]
    activation = figures(2, 10)
    kept = rng.choice((0.0, 0.43, 0.5, 1.0))
    memory = PassMemory(activation, tuple(kept * size for size in activation))
    return Instance(placement, PassCosts(*times, rng.choice((0.0, 0.0, 0.5, 4.0)), links), memory, rng.randint(1, 20))


def random_plan(rng: random.Random) -> tuple[Schedule, Instance]:
    """Draw a published schedule, or search a little within a random limit, on a line or on a V."""
    p = rng.randint(2, 6)
    if rng.random() < 0.3:
        m = rng.randint(1, 20)
        schedule = build(rng.choice(sorted(SCHEDULES)), num_ranks=p, num_microbatches=m)
        drawn = random_pipeline(rng, schedule.placement)
        return schedule, Instance(drawn.placement, drawn.costs, drawn.memory, m)
    line = rng.random() < 0.3
    return searched(rng, Placement.linear(p) if line else Placement.vee(p))


def searched(rng: random.Random, on: Placement) -> tuple[Schedule, Instance]:
    """Search a little within a random limit."""
    case, p = random_pipeline(rng, on), on.num_ranks
    least = max(least_memory(case.memory, case.placement))
    limit = least * rng.choice((1.0, rng.uniform(1, p), rng.uniform(1, 2 * p)))
    schedule = zb_auto(
        case.costs,
        case.memory,
        p,
        case.num_microbatches,
        limit,
        placement=(on,),
        objective=rng.choice(("span", "makespan")),
        effort=LITTLE,
    )
    return schedule, case


def random_finer_plan(rng: random.Random) -> tuple[Schedule, Instance]:
    """Search a little, or draw a random order, on a loop or a wave of up to six stages per rank."""
    p, v = rng.randint(2, 6), rng.randint(2, 6)
    on = Placement.wave(p, v) if v % 2 == 0 and rng.random() < 0.5 else Placement.interleaved(p, v)
    if rng.random() < 0.5:
        return searched(rng, on)
    drawn = random_pipeline(rng, on)
    case = replace(drawn, num_microbatches=min(drawn.num_microbatches, 8))
    return random_schedule(rng, case), case


def no_plan_is_below(
    seeds: range, draw: Callable[[random.Random], tuple[Schedule, Instance]] = random_plan, most_effort: int = 120_000
) -> None:
    """Compare random plans with the bounds at their own peak memory, for both metrics."""
    for seed in seeds:
        schedule, case = draw(random.Random(seed))
        timeline = simulate(schedule, case.costs, case.memory)
        pipeline = (case.costs, case.memory, Workload.of(schedule), peak_memory(schedule, case))
        for objective, cost in (("span", timeline.span_ms), ("makespan", timeline.makespan_ms)):
            for effort in (0, most_effort):
                bound = lower_bound(*pipeline, objective, effort=effort)
                assert bound.value_ms <= cost * (1 + 1e-9), f"seed {seed}: {objective} {cost} is below {bound}"


def test_no_plan_is_below_the_bound() -> None:
    no_plan_is_below(range(30), most_effort=20_000)


def test_no_plan_on_a_loop_or_a_wave_is_below_the_bound() -> None:
    no_plan_is_below(range(12), random_finer_plan, most_effort=20_000)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(10))
def test_no_plan_of_ten_thousand_on_loops_and_waves_is_below_the_bound(part: int) -> None:
    no_plan_is_below(range(10_000 + part * 1000, 10_000 + part * 1000 + 1000), random_finer_plan)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(10))
def test_no_plan_of_ten_thousand_is_below_the_bound(part: int) -> None:
    no_plan_is_below(range(10_000 + part * 1000, 10_000 + part * 1000 + 1000))


@pytest.mark.parametrize(("p", "m"), [(3, 7), (4, 16), (6, 24), (9, 36)])
def test_v_half_is_proved_optimal_for_equal_passes(p: int, m: int) -> None:
    """The closed forms give 6m + 6p - 3k - 1 for every memory of k passes from that of V-Half to that of 1F1B."""
    schedule = build("v-half", num_ranks=p, num_microbatches=m)
    placement = schedule.placement
    costs, memory = PassCosts.uniform(placement, 2.0, 2.0, 2.0), PassMemory.uniform(placement, 2.0, 2.0)
    timeline = simulate(schedule, costs, memory)
    half = round(2 * max(timeline.peak_activation))
    for k in range(half, 2 * p):
        assert lower_bound(costs, memory, Workload(placement, m), k, effort=0).value_ms == 6 * m + 6 * p - 3 * k - 1
    for objective, cost in (("span", timeline.span_ms), ("makespan", timeline.makespan_ms)):
        assert lower_bound(costs, memory, Workload(placement, m), half, objective).gap(cost) == 0.0


def test_plan_with_short_w_passes_is_proved_optimal_in_the_memory_of_1f1b() -> None:
    """Rank 0 needs more than its work: it waits for the last rank, which runs almost all its W passes in between."""
    placement = Placement.vee(4)
    costs, memory = PassCosts.uniform(placement, 30.0, 30.0, 20.0), PassMemory.uniform(placement)
    plan = zb_auto(costs, memory, 4, 12, 4.0, placement="vee")
    bound = lower_bound(costs, memory, Workload(placement, 12), 4.0)
    assert bound.gap(simulate(plan, costs).span_ms) == 0.0
    assert bound.reason == "way to a rank, its work, and back"


def test_without_a_limit_w_passes_do_not_delay_the_way_back() -> None:
    """Three F to the last rank, its 24 F and B, three B back and one W."""
    placement = Placement.vee(4)
    costs, memory = PassCosts.uniform(placement, 2.0, 2.0, 2.0), PassMemory.uniform(placement)
    setting = Setting.of(costs, memory, placement, 6, (math.inf,) * 4, False)
    assert by_ways(setting)[0] == 3 + 24 + 3 + 1


def test_rounding_error_in_the_limit_does_not_raise_the_bound() -> None:
    """Room for 3 passes of 9.22...: the memory of two, subtracted twice, leaves slightly less than nothing."""
    placement, passes = Placement.vee(4), 9.221157199663265
    costs, memory = PassCosts.uniform(placement, 16.0, 14.0, 5.0), PassMemory.uniform(placement, 2 * passes, 0.0)
    least, larger = (
        lower_bound(costs, memory, Workload(placement, 2), 3 * passes * (1 + e), effort=0) for e in (0.0, 1e-12)
    )
    assert least.value_ms == pytest.approx(larger.value_ms)


def test_time_to_make_room() -> None:
    """Memory for 4 passes on a rank with F, B and W of 2, 3 and 5 on both chunks."""
    placement = Placement.vee(2)
    costs = PassCosts((2.0,) * 4, (3.0,) * 4, (5.0,) * 4)

    def room(wgrad: float, counts: tuple[int, int]) -> float:
        memory = PassMemory.uniform(placement, 2.0, wgrad)
        return time_to_make_room(Setting.of(costs, memory, placement, 9, (4.0, 4.0), False), 0, counts)

    assert room(2.0, (2, 2)) == 0.0
    assert room(2.0, (3, 3)) == 2 * (3 + 5) + 2, "two chunks are freed, and one F runs besides the F that waits"
    assert room(0.0, (3, 3)) == 2 * 3 + 2, "B alone frees all memory"
    assert room(1.0, (3, 3)) == 4 * 3 + 2, "four B free as much as two B and two W, and sooner"

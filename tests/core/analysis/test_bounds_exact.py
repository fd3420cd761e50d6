"""Compare the bounds with the optima of an exact solver, whose schedules must be valid and within the limit."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement, build, simulate, validate
from megatron.zero_bubble.core.analysis.bounds import least_memory, lower_bound
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search import zb_auto
from megatron.zero_bubble.core.search.placements import placements
from tests.helpers.exact import ExactSchedule, solve
from tests.helpers.instances import Instance, peak_memory, random_instance, random_schedule

pytestmark = pytest.mark.skipif(
    find_spec("ortools") is None, reason="needs OR-tools: pip install 'megatron-zero-bubble[exact]'"
)


def small_case(seed: int) -> tuple[Instance, bool, float, str, ExactSchedule]:
    """Draw and solve a pipeline with a limit between the least memory and a random schedule's peak."""
    rng = random.Random(seed)
    case = random_instance(rng, most_ranks=3, most_microbatches=3, whole=True)
    fused, objective = rng.random() < 0.3, rng.choice(("span", "makespan"))
    hint = random_schedule(rng, case, fused)
    least = max(least_memory(case.memory, case.placement, fused=fused))
    limit = rng.uniform(least, max(peak_memory(hint, case), least))
    pipeline = (case.costs, case.memory, case.placement, case.num_microbatches)
    return case, fused, limit, objective, solve(*pipeline, limit, objective, fused=fused, hint=hint, seconds=5.0)


def small_vee(seed: int) -> tuple[Instance, bool, float, str, ExactSchedule]:
    """Draw and solve a V of 2 to 4 ranks with equal stages, within a limit of whole chunks up to that of 1F1B."""
    rng = random.Random(seed)
    p = rng.randint(2, 4)
    placement, m = Placement.vee(p), rng.randint(2, {2: 8, 3: 5, 4: 4}[p])
    times = [2.0 * rng.randint(2, 9) for _ in range(3)]
    costs = PassCosts.uniform(placement, *times, rng.choice((0.0, 1.0)))
    memory = PassMemory.uniform(placement, 2.0, rng.choice((0.0, 1.0, 2.0)))
    limit, objective = float(rng.randint(2, 2 * p)), rng.choice(("span", "makespan"))
    hint = zb_auto(costs, memory, p, m, limit, placement="vee", objective=objective)
    exact = solve(costs, memory, placement, m, limit, objective, hint=hint, seconds=5.0)
    return Instance(placement, costs, memory, m), False, limit, objective, exact


def small_finer(seed: int) -> tuple[Instance, bool, float, str, ExactSchedule]:
    """Draw and solve a loop or a wave of 2 to 4 ranks with three or four equal stages each, up to four microbatches."""
    rng = random.Random(seed)
    p, v, m = rng.randint(2, 4), rng.choice((3, 4)), rng.randint(1, 4)
    shape = rng.choice(("loop", "wave")) if v == 4 else "loop"
    (placement,) = placements(shape, p, v)
    times, comm = [float(v * rng.randint(2, 9)) for _ in range(3)], rng.choice((0.0, 1.0))
    costs = PassCosts.uniform(placement, *times, comm)
    memory = PassMemory.uniform(placement, float(v), rng.choice((0.0, v / 2, float(v))))
    limit, objective = float(rng.randint(v, v * min(m, p))), rng.choice(("span", "makespan"))
    ours = zb_auto(costs, memory, p, m, limit, placement=shape, num_chunks=v, objective=objective)
    exact = solve(costs, memory, placement, m, limit, objective, hint=ours, seconds=20.0)
    return Instance(placement, costs, memory, m), False, limit, objective, exact


def compare(
    seeds: range, draw: Callable[[int], tuple[Instance, bool, float, str, ExactSchedule]] = small_case
) -> tuple[int, int]:
    """Return the number of solved cases, and how often the bound equals the optimum.

    A case is solved if the solver proves the optimum, or if its schedule is as short as the bound.
    """
    solved = equal = 0
    for seed in seeds:
        case, fused, limit, objective, exact = draw(seed)
        validate(exact.schedule)
        assert peak_memory(exact.schedule, case) <= limit * (1 + 1e-4)
        pipeline = (case.costs, case.memory, Workload(case.placement, case.num_microbatches))
        bound = lower_bound(*pipeline, limit, objective, fused)
        if exact.optimal:
            assert bound.value_ms <= exact.bound_ms * (1 + 1e-9), f"seed {seed}: {exact.bound_ms} is below {bound}"
        proved = bound.gap(exact.bound_ms if exact.optimal else exact.cost_ms) == 0.0
        solved += exact.optimal or proved
        equal += proved
    return solved, equal


def test_bound_equals_the_optimum_in_most_cases() -> None:
    solved, equal = compare(range(40))
    assert solved >= 20
    assert equal >= 0.9 * solved


def test_bound_equals_the_optimum_in_most_cases_on_a_v() -> None:
    solved, equal = compare(range(40), small_vee)
    assert solved >= 20
    assert equal >= 0.9 * solved


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_search_and_bound_equal_the_optimum_in_most_cases_on_loops_and_waves() -> None:
    """The schedule that the solver starts from is the search's: it is as long as the optimum, or the solver's."""
    solved = found = 0
    for seed in range(40):
        case, _, limit, objective, exact = small_finer(seed)
        pipeline = (case.costs, case.memory, Workload(case.placement, case.num_microbatches))
        bound = lower_bound(*pipeline, limit, objective)
        ours = zb_auto(
            case.costs,
            case.memory,
            case.placement.num_ranks,
            case.num_microbatches,
            limit,
            placement=(case.placement,),
            objective=objective,
        )
        cost = getattr(simulate(ours, case.costs), f"{objective}_ms")
        assert bound.value_ms <= exact.cost_ms * (1 + 1e-9)
        if exact.optimal or bound.gap(exact.cost_ms) == 0.0:
            solved += 1
            found += cost <= exact.cost_ms * (1 + 1e-9)
    assert solved >= 20
    assert found >= 0.8 * solved


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(8))
def test_bound_equals_the_optimum_in_most_cases_in_full(part: int) -> None:
    solved, equal = compare(range(1000 + 100 * part, 1100 + 100 * part))
    assert equal > 0.6 * solved


def test_zb_h1_is_optimal_at_1f1b_memory() -> None:
    """Two ranks and four microbatches, started from 1F1B, which is not optimal."""
    placement = Placement.linear(2)
    costs, memory = PassCosts.uniform(placement, 2.0, 2.0, 2.0, 1.0), PassMemory.uniform(placement)
    hint = build("1f1b", num_ranks=2, num_microbatches=4)
    exact = solve(costs, memory, placement, 4, 2.0, hint=hint)
    h1 = simulate(build("zb-h1", num_ranks=2, num_microbatches=4), costs, memory)
    assert exact.optimal
    assert exact.cost_ms == exact.bound_ms == h1.span_ms < simulate(hint, costs).span_ms
    assert lower_bound(costs, memory, Workload(placement, 4), 2.0).value_ms == pytest.approx(exact.cost_ms)


def test_fractional_times_lose_less_than_one_tick_per_pass() -> None:
    placement = Placement.vee(2)
    costs, memory = PassCosts.uniform(placement, 1.23, 3.21, 0.777, 0.11), PassMemory.uniform(placement, 1.0, 0.4)
    exact = solve(costs, memory, placement, 2, 2.0, "makespan")
    assert exact.optimal
    assert exact.bound_ms <= exact.cost_ms * (1 + 1e-9)
    assert exact.bound_ms == pytest.approx(exact.cost_ms, rel=1e-4)


def test_too_low_limit_is_rejected() -> None:
    placement = Placement.linear(2)
    costs, memory = PassCosts.uniform(placement, 1.0, 1.0, 1.0), PassMemory.uniform(placement)
    with pytest.raises(ValueError, match=r"no schedule satisfies the memory limit 0\.9"):
        solve(costs, memory, placement, 2, 0.9)

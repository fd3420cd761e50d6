"""Tests of the lower bounds: no schedule is below them, and they equal the optima known from the literature."""

from __future__ import annotations

import csv
import random
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest

from megatron.zero_bubble import Kind, PassCosts, PassMemory, Placement, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.bounds import Bound, least_memory, lower_bound
from megatron.zero_bubble.core.analysis.bounds.jackson import one_machine_bound
from megatron.zero_bubble.core.ir.workload import Workload
from tests.helpers.instances import peak_memory, random_instance, random_schedule
from tests.helpers.rows import some

PUBLISHED = Path(__file__).parents[3] / "configs/published/zero_bubble_table5.csv"
HIDDEN_SIZE_AND_HEADS = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}


def no_schedule_is_below(seeds: range, *effort: int) -> None:
    """Compare random schedules with the bounds at their own peak memory, for both metrics."""
    for seed in seeds:
        rng = random.Random(seed)
        instance = random_instance(rng, most_ranks=4, most_microbatches=7)
        fused = rng.random() < 0.3
        schedule = random_schedule(rng, instance, fused)
        timeline = simulate(schedule, instance.costs, instance.memory)
        limit = peak_memory(schedule, instance)
        costs, memory, placement, m = instance.costs, instance.memory, instance.placement, instance.num_microbatches
        for objective, cost in (("span", timeline.span_ms), ("makespan", timeline.makespan_ms)):
            bound = lower_bound(costs, memory, Workload(placement, m), limit, objective, fused, *effort)
            assert bound.value_ms <= cost * (1 + 1e-9), f"seed {seed}: {objective} {cost} is below {bound}"


def test_no_schedule_that_splits_some_backwards_is_below_the_bound() -> None:
    for seed in range(80):
        rng = random.Random(seed)
        instance = random_instance(rng, most_ranks=4, most_microbatches=6)
        grown = tuple(rng.choice((0.5, 1.0, 4.0, 12.0)) * kept for kept in instance.memory.activation)
        instance = replace(instance, memory=replace(instance.memory, wgrad=grown))
        schedule = partly_split(rng, random_schedule(rng, instance, fused=True))
        timeline = simulate(schedule, instance.costs, instance.memory)
        costs, memory, placement, m = instance.costs, instance.memory, instance.placement, instance.num_microbatches
        for objective, cost in (("span", timeline.span_ms), ("makespan", timeline.makespan_ms)):
            bound = lower_bound(
                costs, memory, Workload(placement, m), peak_memory(schedule, instance), objective, effort=5_000
            )
            assert bound.value_ms <= cost * (1 + 1e-9), f"seed {seed}: {objective} {cost} is below {bound}"


def partly_split(rng: random.Random, schedule: Schedule) -> Schedule:
    """Split some backwards of some stages, and run their W anywhere later."""
    stages = {stage for stage in range(schedule.num_stages) if rng.random() < 0.6}
    order = []
    for row in schedule.order:
        passes = list(row)
        for p in row:
            if p.kind is Kind.BW and p.stage in stages and rng.random() < 0.6:
                at = passes.index(p)
                passes[at] = p._replace(kind=Kind.B)
                passes.insert(min(len(passes), at + rng.choice((1, 1, 2, 5, 100))), p._replace(kind=Kind.W))
        order.append(tuple(passes))
    return replace(schedule, order=tuple(order))


@pytest.mark.parametrize("part", some(range(3), 0))
def test_no_schedule_is_below_the_bound(part: int) -> None:
    """With the default effort for the first five only, to save time."""
    no_schedule_is_below(range(part * 500, part * 500 + 5))
    no_schedule_is_below(range(part * 500 + 5, part * 500 + 200), 5_000)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(20))
def test_no_schedule_of_ten_thousand_is_below_the_bound(part: int) -> None:
    no_schedule_is_below(range(10_000 + part * 500, 10_000 + part * 500 + 500))


def published_rows() -> list[dict[str, str]]:
    lines = PUBLISHED.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.mark.parametrize("row", published_rows(), ids=lambda row: f"{row['model']}-{row['m']}")
def test_zb_h1_is_proved_optimal_for_every_row_of_the_paper(row: dict[str, str]) -> None:
    """With the paper's formulas for M_B and M_W, ZB-H1 stays within 1F1B's memory and its gap is 0."""
    p, m = int(row["p"]), int(row["m"])
    placement = Placement.linear(p)
    costs = PassCosts.uniform(placement, *(float(row[key]) for key in ("t_f_ms", "t_b_ms", "t_w_ms", "t_comm_ms")))
    h, heads = HIDDEN_SIZE_AND_HEADS[row["model"]]
    memory = PassMemory.uniform(placement, 34 * h + 5 * heads * 1024, 32 * h)
    timeline = simulate(build("zb-h1", num_ranks=p, num_microbatches=m), costs, memory)
    limit = p * memory.activation[0]
    assert max(timeline.peak_activation) <= p
    assert lower_bound(costs, memory, Workload(placement, m), limit).gap(timeline.span_ms) == 0.0
    relaxed = lower_bound(costs, memory, Workload(placement, m), 2 * limit)
    work = m * (costs.forward_ms[0] + costs.backward_ms[0] + costs.wgrad_ms[0])
    assert (relaxed.value_ms - work) / relaxed.value_ms <= float(row["zb_2p"]) + 5e-5


def test_1f1b_is_proved_optimal_for_fused_backwards_at_its_memory() -> None:
    placement = Placement.linear(6)
    costs, memory = PassCosts.uniform(placement, 3.0, 2.0, 4.0), PassMemory.uniform(placement)
    timeline = simulate(build("1f1b", num_ranks=6, num_microbatches=15), costs, memory)
    for objective, cost in (("span", timeline.span_ms), ("makespan", timeline.makespan_ms)):
        assert lower_bound(costs, memory, Workload(placement, 15), 6.0, objective, fused=True).gap(cost) == 0.0
        assert lower_bound(costs, memory, Workload(placement, 15), 6.0, objective).gap(cost) > 0.1


@pytest.mark.parametrize("m", [1, 2, 5])
def test_one_microbatch_at_a_time_is_proved_optimal_at_minimal_memory(m: int) -> None:
    """With memory for one microbatch, microbatches run one after the other, if W needs all that F has stored."""
    placement = Placement.linear(4)
    costs = PassCosts((3.0, 1.0, 2.0, 5.0), (2.0,) * 4, (0.0,) * 4, 1.5)
    memory = PassMemory.uniform(placement)
    round_trip = 11.0 + 8.0 + 2 * 3 * 1.5
    for objective in ("span", "makespan"):
        assert lower_bound(costs, memory, Workload(placement, m), 1.0, objective).value_ms == pytest.approx(
            m * round_trip
        )


def test_makespan_bound_includes_the_last_ranks_late_start() -> None:
    """Without a limit, the makespan of a single-chunk schedule is at least the last rank's late start plus its work."""
    placement = Placement.linear(8)
    costs, memory = PassCosts.uniform(placement, 2.0, 2.0, 2.0, 0.5), PassMemory.uniform(placement)
    bound = lower_bound(costs, memory, Workload(placement, 40), None, "makespan")
    assert bound == Bound(pytest.approx(40 * 6 + 7 * 2.5), "work", 7)
    assert lower_bound(costs, memory, Workload(placement, 40), None).value_ms == pytest.approx(240)


@pytest.mark.full
def test_bounds_never_fall_with_less_memory() -> None:
    rng = random.Random(7)
    for _ in range(3):
        instance = random_instance(rng, 3, 5)
        least = max(least_memory(instance.memory, instance.placement))
        pipeline = (instance.costs, instance.memory, Workload(instance.placement, instance.num_microbatches))
        for objective in ("span", "makespan"):
            values = [lower_bound(*pipeline, least * k / 4, objective).value_ms for k in (4, 5, 6, 8, 12, 100)]
            values.append(lower_bound(*pipeline, None, objective).value_ms)
            assert all(a >= b * (1 - 1e-9) for a, b in pairwise(values))


def test_jackson_on_handmade_cases() -> None:
    """In the first case the job with the long tail preempts: 0-1 first job, 1-3 second (ends at 3+7), 3-6 first job."""
    assert one_machine_bound([(0.0, 4.0, 2.0), (1.0, 2.0, 7.0)]) == 10.0
    assert one_machine_bound([(0.0, 4.0, 5.0), (1.0, 2.0, 7.0)]) == 11.0
    assert one_machine_bound([(5.0, 1.0, 0.0)]) == 6.0
    assert one_machine_bound([]) == 0.0


def test_jackson_equals_the_maximum_over_all_subsets() -> None:
    """In theory the bound is the maximum over subsets of smallest head plus all lengths plus smallest tail."""
    rng = random.Random(3)
    for _ in range(100):
        jobs = [tuple(float(rng.randint(0, 9)) for _ in range(3)) for _ in range(rng.randint(1, 7))]
        chosen = (
            [job for job, taken in zip(jobs, mask, strict=True) if taken] for mask in product((0, 1), repeat=len(jobs))
        )
        worst = max(
            min(h for h, _, _ in some) + sum(n for _, n, _ in some) + min(t for _, _, t in some)
            for some in chosen
            if some
        )
        assert one_machine_bound(jobs) == worst


def test_limit_below_one_microbatch_names_the_least_limit() -> None:
    placement = Placement.vee(2)
    memory = PassMemory((3.0, 1.0, 1.0, 2.0), (1.0, 1.0, 1.0, 1.0))
    costs = PassCosts((1.0,) * 4, (1.0,) * 4, (1.0,) * 4)
    with pytest.raises(ValueError, match="room for one microbatch, 5 on rank 0; got 4.9"):
        lower_bound(costs, memory, Workload(placement, 3), 4.9)
    both = lower_bound(costs, memory, Workload(placement, 3), 5.0)
    assert lower_bound(costs, memory, Workload(placement, 3), (5.0, 5.0)) == both
    assert (
        lower_bound(costs, memory, Workload(placement, 3), (5.0, 2.0)).value_ms
        > lower_bound(costs, memory, Workload(placement, 3), (9.0, 9.0)).value_ms
    )
    with pytest.raises(ValueError, match="one for each of the 2 ranks"):
        lower_bound(costs, memory, Workload(placement, 3), (5.0, 5.0, 5.0))


def test_memory_may_be_too_small_to_count() -> None:
    """More microbatches fit into the limit than a float can count."""
    on = Placement.linear(2)
    costs, none = PassCosts.uniform(on, 1, 1, 1), PassMemory((1.0, 1.0), (0.0, 0.0))
    found, expected = (
        lower_bound(costs, memory, Workload(on, 3), 2.0, "span", effort=0)
        for memory in (replace(none, wgrad=(5e-324,) * 2), none)
    )
    assert found == expected


def test_least_memory_counts_a_wgrad_larger_than_the_activation() -> None:
    memory = PassMemory((3.0, 1.0, 1.0, 2.0), (1.0, 1.0, 1.0, 4.0))
    assert least_memory(memory, Placement.vee(2)) == (7.0, 2.0)
    assert least_memory(memory, Placement.vee(2), fused=True) == (5.0, 2.0)


@pytest.mark.full
def test_more_effort_never_lowers_the_bound() -> None:
    rng = random.Random(11)
    for _ in range(30):
        instance = random_instance(rng, 4, 6)
        pipeline = (instance.costs, instance.memory, Workload(instance.placement, instance.num_microbatches))
        limit = 1.5 * max(least_memory(instance.memory, instance.placement))
        by_effort = [lower_bound(*pipeline, limit, effort=effort).value_ms for effort in (0, 400, 100_000)]
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(by_effort))


def test_gap_is_relative_and_rounded_to_zero() -> None:
    assert Bound(90.0, "work").gap(100.0) == pytest.approx(0.1)
    assert Bound(100.0 + 1e-9, "work").gap(100.0) == 0.0
    assert Bound(0.0, "work").gap(0.0) == 0.0


def test_bound_of_many_ranks_sees_the_wait_for_the_first_microbatch() -> None:
    """A microbatch returns to rank 0 after 254 transfers and 255 passes, in which rank 0 has 255 passes to run."""
    placement = Placement.vee(128)
    costs, memory = PassCosts.uniform(placement, 11.35, 11.25, 8.13, 0.38), PassMemory.uniform(placement, 1.0, 0.4325)
    bound = lower_bound(costs, memory, Workload(placement, 256), 256.0)
    work = 256 * (11.35 + 11.25 + 8.13)
    assert bound.value_ms == pytest.approx(work + 90.845, abs=0.01)

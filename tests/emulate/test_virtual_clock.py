"""Run the real executor and transport on virtual clocks: passes run as planned, to within 0.01 ms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from megatron.zero_bubble import Kind, PassCosts, PassMemory, Placement, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.period import iterations, period_ms
from megatron.zero_bubble.core.schedules import SCHEDULES
from megatron.zero_bubble.core.search import zb_auto
from megatron.zero_bubble.core.search.recompute import with_recomputation
from megatron.zero_bubble.engine.runtime.groups import Directions
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers.emulate.execute import (
    virtual_cases,
    virtual_deviation_ms,
    virtual_iterations,
    virtual_vocabulary_cases,
)
from tests.helpers.emulate.links import VirtualCollectives
from tests.helpers.gpipe import PLACEMENTS, gpipe
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some

Case = tuple[Schedule, PassCosts]


def deviations(_rank: int, cases: list[Case]) -> list[tuple[float, str]]:
    """Run every case on this rank; return the largest deviation from the plan and its location, per case."""
    assert dist.group.WORLD is not None
    transport, collectives = Transport(Directions.of(dist.group.WORLD), []), VirtualCollectives(dist.group.WORLD)
    results = [virtual_deviation_ms(schedule, costs, transport, collectives) for schedule, costs in cases]
    assert transport.num_in_flight == 0
    collectives.close()
    return results


def assert_executed_as_planned(ranks: RankPool, cases: list[Case]) -> None:
    for rank, row in enumerate(ranks.run(cases[0][0].num_ranks, deviations, cases, timeout=240)):
        for (schedule, costs), (deviation_ms, where) in zip(cases, row, strict=True):
            assert deviation_ms <= 0.01, (schedule.name, schedule.num_microbatches, costs, rank, where)


@pytest.mark.parametrize(("num_ranks", "every"), some([(2, 1), (4, 1), (8, 7), (8, 1)], (2, 1)))
def test_every_schedule_runs_as_planned(ranks: RankPool, num_ranks: int, every: int) -> None:
    """Eight ranks are slow on few cores, so one case in ``every`` is enough, with another ratio of costs each time."""
    cases = list(virtual_cases(num_ranks))[::every]
    assert {schedule.name.split()[0] for schedule, _ in cases} >= {"1f1b", "zb-h2", "zb-v", "seq-zb-h1", "pipe-offload"}
    assert_executed_as_planned(ranks, cases)


@pytest.mark.parametrize("num_ranks", some([2, 4], 2))
def test_pairs_run_as_planned(ranks: RankPool, num_ranks: int) -> None:
    cases = []
    for name, recipe in SCHEDULES.items():
        for num_microbatches in (1, num_ranks, 3 * num_ranks) if recipe.has_pairs else ():
            schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, pairs=True)
            cases.append((schedule, PassCosts.uniform(schedule.placement, 18.522, 18.086, 9.337, 0.601)))
    assert len(cases) == 9 and sum(map(bool, (schedule.pairs for schedule, _ in cases))) >= 5
    assert_executed_as_planned(ranks, cases)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_ranks", "every"), some([(2, 1), (2, 5), (4, 1), (8, 1)], (2, 5)))
def test_every_schedule_runs_as_planned_with_vocabulary(ranks: RankPool, num_ranks: int, every: int) -> None:
    """One case in ``every``, with another number of microbatches or the other algorithm each time."""
    cases = list(virtual_vocabulary_cases(num_ranks))[::every]
    assert {schedule.name.split()[0] for schedule, _ in cases} >= {
        name for name, recipe in SCHEDULES.items() if not recipe.sliced
    }
    assert all(any(p.kind is Kind.T for p in schedule.passes()) for schedule, _ in cases)
    assert_executed_as_planned(ranks, cases)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), some([(2, 4), (4, 8), (8, 16)], (2, 4)))
def test_recomputation_runs_as_planned(ranks: RankPool, num_ranks: int, num_microbatches: int) -> None:
    """On all stages, and on the first ones only."""
    cases = []
    for name in ("1f1b", "zb-h1", "zb-v", "zb-interleaved"):
        schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        costs = PassCosts.uniform(schedule.placement, 10.0, 19.0, 9.0, 0.5)
        costs = replace(costs, recompute_ms=costs.forward_ms)
        cases += [(with_recomputation(schedule, stages), costs) for stages in (None, range(num_ranks // 2))]
    assert_executed_as_planned(ranks, cases)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: str(p.stage_to_rank))
@pytest.mark.parametrize("num_slices", [1, 2])
def test_chunks_and_slices_run_as_planned(ranks: RankPool, placement: Placement, num_slices: int) -> None:
    """At the turn of a V, tensors pass between stages of one rank; slices of a sequence are separate passes."""
    schedule = gpipe(placement, 3, num_slices)
    stages = range(schedule.num_stages)
    costs = PassCosts(
        tuple(3.0 + s for s in stages), tuple(5.0 - s / 2 for s in stages), tuple(2.0 for _ in stages), 0.5
    )
    assert_executed_as_planned(ranks, [(schedule, costs)])


@pytest.mark.parametrize("v", [3, 4])
def test_searched_loops_and_waves_run_as_planned(ranks: RankPool, v: int) -> None:
    """With fewer microbatches than ranks, one more, and twice as many; passes and stages of different lengths."""
    cases, p = [], 3
    for placement in (Placement.interleaved(p, v), *([Placement.wave(p, v)] if v % 2 == 0 else [])):
        stages = range(placement.num_stages)
        times = (3.0 + s / 4 for s in stages), (5.0 - s / 8 for s in stages), (2.0 for _ in stages)
        costs = PassCosts(*map(tuple, times), 0.5)
        for m in (1, p - 1, p + 1, 2 * p):
            limit, sizes = PassMemory.uniform(placement), (p, m, float(p))
            cases.append((zb_auto(costs, limit, *sizes, placement=(placement,), effort=0.02), costs))
    assert_executed_as_planned(ranks, cases)


def worst_of_two_pipelines(rank: int) -> float:
    groups = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    group = groups[rank // 2]
    transport, collectives = Transport(Directions.of(group), []), VirtualCollectives(group)
    cases = list(virtual_vocabulary_cases(2))[::5]
    worst = max(virtual_deviation_ms(*case, transport, collectives)[0] for case in cases)
    collectives.close()
    return worst


def test_two_pipelines_at_the_same_time(ranks: RankPool) -> None:
    """The collectives of one pipeline do not wait for the other pipeline."""
    assert max(ranks.run(4, worst_of_two_pipelines)) <= 0.01


def ends_of_iterations(_rank: int, cases: list[Case], step_ms: float, ahead: bool) -> list[list[float]]:
    assert dist.group.WORLD is not None
    transport = Transport(Directions.of(dist.group.WORLD), [])
    return [virtual_iterations(schedule, costs, step_ms, ahead, 4, transport) for schedule, costs in cases]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("num_ranks", "every"), some([(2, 1), (2, 3), (4, 11), (4, 1)], (2, 3), (4, 11)))
def test_consecutive_iterations_run_as_simulated(ranks: RankPool, num_ranks: int, every: int, ahead: bool) -> None:
    """With steps taken ahead of validation, and with a synchronous optimizer; one case in ``every``."""
    cases = []
    for name in SCHEDULES:
        for num_microbatches in (1, 3 * num_ranks):
            schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
            cases += [(schedule, PassCosts.uniform(schedule.placement, *ms)) for ms in ((10, 10, 10), (5, 9, 3, 4))]
    cases = cases[::every]
    measured = ranks.run(num_ranks, ends_of_iterations, cases, 5.0, ahead)
    for index, (schedule, costs) in enumerate(cases):
        planned = list(iterations(schedule, costs, 5.0, ahead, 4))
        for rank in range(num_ranks):
            assert measured[rank][index] == pytest.approx([ends[rank] for ends in planned], abs=0.01), schedule.name


def test_period_is_span_plus_step_with_steps_ahead(ranks: RankPool) -> None:
    """8 ranks, 24 microbatches, twice 1F1B's memory; with a synchronous optimizer the period is makespan plus step."""
    placement = Placement.linear(8)
    costs = PassCosts.uniform(placement, 50, 50, 50)
    schedule = zb_auto(costs, PassMemory.uniform(placement), 8, 24, 16.0, placement="linear", objective="span")
    timeline = simulate(schedule, costs)
    for ahead, whole in ((True, timeline.span_ms), (False, timeline.makespan_ms)):
        assert period_ms(schedule, costs, 25.0, ahead) == pytest.approx(whole + 25.0)
        for ends in ranks.run(8, ends_of_iterations, [(schedule, costs)], 25.0, ahead):
            assert ends[0][-1] - ends[0][-2] == pytest.approx(whole + 25.0, abs=0.01)
    assert timeline.makespan_ms > 1.05 * timeline.span_ms

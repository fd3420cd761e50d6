"""Tests of the measured bubble: a run that equals its plan has the plan's bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.core.analysis.bubble import Bubble, RankIteration, RankIterations, bubble_of
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.ir import Kind, Pass
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.core.search.vocabulary import with_vocabulary
from tests.helpers.strategies import costs_for, schedules


def as_measured(
    timeline: Timeline, iterations: int = 1, pairs: Sequence[frozenset[Pass]] = (frozenset(),) * 99
) -> Bubble:
    """Return the meter's result for a run that repeats ``timeline``."""
    rows = []
    for spans, own in zip(timeline.spans, pairs, strict=False):
        durations: dict[tuple[int, Kind, int], list[float]] = {}
        for work, start, end in spans:
            durations.setdefault((work.stage, work.kind, work.slice), []).append(end - start)
        work_ms = sum(end - start for _, start, end in spans)
        iteration = RankIteration(spans[-1].end_ms - spans[0].start_ms, work_ms)
        pass_ms = {key: sum(times) / len(times) for key, times in durations.items()}
        order = tuple(span.pass_ for span in spans)
        flow = timeline.schedule.make_flow
        rows.append(RankIterations((iteration,) * iterations, order, pass_ms, flow, pairs=own))
    return bubble_of(rows)


@given(st.data())
def test_run_equal_to_its_plan_has_the_plans_bubble(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    costs = data.draw(costs_for(schedule))
    timeline = simulate(schedule, costs)
    instant = simulate(schedule, replace(costs, comm_ms=0.0, links={}))
    bubble = as_measured(timeline, 3)
    assert bubble.num_iterations == 3
    assert bubble.measured == pytest.approx(timeline.bubble_rate("span"), abs=1e-9)
    assert bubble.planned == pytest.approx(instant.bubble_rate("span"), abs=1e-9)
    assert bubble.idle == pytest.approx(timeline.idle_rate("span"), abs=1e-9)
    assert bubble.planned_idle == pytest.approx(instant.idle_rate("span"), abs=1e-9)


@pytest.mark.parametrize("algorithm", [1, 2])
def test_bubble_of_a_divided_vocabulary_is_the_plans(algorithm: Algorithm) -> None:
    schedule = build("zb-h1", num_ranks=3, num_microbatches=5)
    costs = PassCosts.uniform(schedule.placement, 5, 6, 4)
    costs = replace(costs, vocabulary=VocabularyCosts.uniform(3, 2.0, 1.0))
    timeline = simulate(with_vocabulary(schedule, costs, algorithm, delay=True), costs)
    bubble = as_measured(timeline)
    assert bubble.planned == pytest.approx(bubble.measured) == pytest.approx(timeline.bubble_rate("span"))


def test_iterations_are_weighted_by_length_and_use_their_busiest_rank() -> None:
    schedule = build("zb-h1", num_ranks=2, num_microbatches=2)
    rows = [
        RankIterations((RankIteration(10.0, a), RankIteration(30.0, b)), schedule.order[rank], {})
        for rank, (a, b) in enumerate(((8.0, 10.0), (4.0, 20.0)))
    ]
    assert bubble_of(rows).measured == pytest.approx(1 - (8 + 20) / (10 + 30))
    assert bubble_of(rows).idle == pytest.approx(1 - (6 + 15) / (10 + 30))


def test_stage_without_times_has_no_bubble() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=1)
    rows = [RankIterations((RankIteration(0.0, 0.0),), order, {}) for order in schedule.order]
    assert bubble_of(rows) == Bubble(1, 0.0, 0.0, 0.0, 0.0)


def test_a_pair_counts_once() -> None:
    schedule = build("interleaved-1f1b", num_ranks=2, num_microbatches=8, pairs=True)
    timeline = simulate(schedule, PassCosts.uniform(schedule.placement, 5.0, 2.0, 4.0))
    own = [frozenset(schedule.pairs.intersection(row)) for row in schedule.order]
    found = as_measured(timeline, pairs=own)
    assert found.measured == pytest.approx(timeline.bubble_rate("span"))
    assert found.planned == pytest.approx(timeline.bubble_rate("span"), abs=0.1)

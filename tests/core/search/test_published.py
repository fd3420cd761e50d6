"""The published schedules take part in every search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import SCHEDULES, PassCosts, PassMemory, Placement, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search import fit, zb_auto
from megatron.zero_bubble.core.search.placements import PlacementChoice, name_of
from megatron.zero_bubble.core.search.problem import Problem
from megatron.zero_bubble.core.search.published import published
from tests.helpers.rows import some

FITTED = ("zb-v", "v-half", "v-min")
times = st.floats(0.5, 20).map(lambda ms: round(ms, 1))


def problem(placement: Placement, num_microbatches: int) -> Problem:
    costs, memory = PassCosts.uniform(placement, 1, 1, 1), PassMemory.uniform(placement, 1, 1)
    limit = (float(num_microbatches),) * placement.num_ranks
    return Problem.of(Workload(placement, num_microbatches), costs, memory, limit, "span")


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 5), (4, 3), (5, 12), (6, 24)])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", *FITTED])
def test_rows_are_those_of_the_named_schedule(name: str, p: int, m: int) -> None:
    schedule = build(name, num_ranks=p, num_microbatches=m)
    question = problem(schedule.placement, m)
    assert question.rows(schedule) in list(published(question))


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches", "costs", "wgrad_memory"),
    [
        ("zb-h1", 12, 13, (1.0, 0.5, 5.0, 0.0), 0.7),
        ("zb-h2", 10, 27, (2.0, 2.0, 2.0, 0.5), 0.3),
        ("zb-v", 3, 2, (0.5, 0.5, 9.0, 0.5), 0.7),
        ("v-half", 3, 2, (0.5, 0.5, 5.0, 0.5), 0.7),
    ],
)
def test_published_schedules_take_part_whatever_the_effort(
    name: str, num_ranks: int, num_microbatches: int, costs: tuple[float, ...], wgrad_memory: float
) -> None:
    schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    on = schedule.placement
    figures = PassCosts.uniform(on, *costs), PassMemory.uniform(on, 1, wgrad_memory)
    known = simulate(schedule, *figures)
    limit = tuple(most_kept(known, figures[1]))
    shape: PlacementChoice = "vee" if name in FITTED else "linear"
    found = zb_auto(*figures, num_ranks, num_microbatches, limit, placement=shape, effort=1e-9)
    assert simulate(found, *figures).span_ms <= known.span_ms + 1e-9


@pytest.mark.full
@given(
    num_ranks=st.integers(2, 24),
    num_microbatches=st.integers(1, 80),
    costs=st.tuples(times, times, times, st.sampled_from([0.0, 0.5, 3.0])),
    wgrad_memory=st.sampled_from([0.3, 0.43, 0.7, 1.0]),
    name=st.sampled_from(sorted(name for name, known in SCHEDULES.items() if not known.sliced)),
    metric=st.sampled_from(["span", "makespan"]),
)
@settings(max_examples=5)
def test_search_is_no_longer_than_any_schedule_at_its_own_peak(
    num_ranks: int, num_microbatches: int, costs: tuple[float, ...], wgrad_memory: float, name: str, metric: Metric
) -> None:
    schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    best = schedule_or_fitted(schedule, costs, wgrad_memory, metric)
    assert searched(schedule, costs, wgrad_memory, metric) <= best + 1e-9


ONCE_LONGER = [
    ("v-min", 24, 73, (11.3, 14.2, 5.2, 1.0), 0.7),
    ("zb-v", 20, 80, (6.2, 5.4, 3.8, 3.0), 0.7),
    ("zb-v", 10, 11, (7.7, 6.2, 5.2, 0.0), 0.43),
    ("zb-v", 32, 32, (29.7, 29.4, 19.9, 0.53), 0.4325),
    ("v-min", 12, 67, (3.4, 13.8, 7.4, 0.5), 0.3),
]


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches", "costs", "wgrad_memory"),
    some(ONCE_LONGER, *ONCE_LONGER[2:5:2]),
)
def test_search_is_no_longer_where_it_once_was(
    name: str, num_ranks: int, num_microbatches: int, costs: tuple[float, ...], wgrad_memory: float
) -> None:
    schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    best = schedule_or_fitted(schedule, costs, wgrad_memory, "span")
    assert searched(schedule, costs, wgrad_memory, "span") <= best + 1e-9


def schedule_or_fitted(schedule: Schedule, times: tuple[float, ...], wgrad_memory: float, metric: Metric) -> float:
    """The bubble rate of the schedule as published, or fitted where it can be."""
    on = schedule.placement
    costs, memory = PassCosts.uniform(on, *times), PassMemory.uniform(on, 1.0, wgrad_memory)
    if schedule.name in FITTED:
        schedule = fit(schedule, costs, memory, objective=metric)
    return simulate(schedule, costs, memory).bubble_rate(metric)


def searched(schedule: Schedule, times: tuple[float, ...], wgrad_memory: float, metric: Metric) -> float:
    """The bubble rate that the search finds in the peak memory of the schedule."""
    on = schedule.placement
    own = PassCosts.uniform(on, *times), PassMemory.uniform(on, 1.0, wgrad_memory)
    limit = max(simulate(schedule, *own).peak_activation)
    finest = Placement.vee(schedule.num_ranks)
    costs, memory = PassCosts.uniform(finest, *times), PassMemory.uniform(finest, 1.0, wgrad_memory)
    chunks = on.num_stages // on.num_ranks if name_of(on) == "loop" else None
    sizes = schedule.num_ranks, schedule.num_microbatches
    found = zb_auto(costs, memory, *sizes, limit, num_chunks=chunks, objective=metric)
    return simulate(found, costs.fit(found.placement), memory.fit(found.placement)).bubble_rate(metric)

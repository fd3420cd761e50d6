"""Planning many microbatches as a few: the repeated rows are valid, cost what they must, and lose nothing."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.validate import validate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search import auto
from megatron.zero_bubble.core.search.auto import zb_auto
from megatron.zero_bubble.core.search.extend import Extension, enough
from megatron.zero_bubble.core.search.problem import Problem, Rows
from megatron.zero_bubble.core.search.published import Published, v_half, v_min, zb_h
from megatron.zero_bubble.core.search.seeds import zb_v

RANKS, MICROBATCHES = 36, 288
TIMES = (29.7, 29.4, 19.9, 0.53)
PATTERNS: dict[str, tuple[str, Published]] = {
    "zb-v": ("vee", zb_v),
    "v-half": ("vee", v_half),
    "v-min": ("vee", v_min),
    "zb-h1": ("linear", partial(zb_h, factor=1, lag=1)),
    "zb-h2": ("linear", partial(zb_h, factor=2, lag=2)),
}


def figures(num_ranks: int, times: tuple[float, float, float, float] = TIMES) -> tuple[PassCosts, PassMemory]:
    *passes, hop = times
    f, b, w = ((ms,) * num_ranks for ms in passes)
    return PassCosts(f, b, w, hop), PassMemory((1.0,) * num_ranks, (0.5,) * num_ranks)


def problem_of(placement: Placement, num_microbatches: int, limit: float = math.inf) -> Problem:
    num_ranks = placement.num_ranks
    return Problem.of(Workload(placement, num_microbatches), *figures(num_ranks), (limit,) * num_ranks, "span")


def test_small_problems_are_searched_with_all_microbatches() -> None:
    assert enough(32, 4096) == 4096
    assert enough(64, 4 * 60) == 240
    assert enough(64, 512) == 212
    assert (1024 - enough(128, 1024)) % 60 == 0


@pytest.mark.parametrize("name", PATTERNS)
def test_an_extended_pattern_is_the_pattern(name: str) -> None:
    shape, pattern = PATTERNS[name]
    problem = problem_of(getattr(Placement, shape)(RANKS), MICROBATCHES)
    extension = Extension(problem, enough(RANKS, MICROBATCHES))
    rows = pattern(extension.short)
    assert extension.short.num_microbatches < MICROBATCHES
    assert extension.of(rows) == pattern(problem)


def test_rows_without_a_steady_state_are_not_extended() -> None:
    extension = Extension(problem_of(Placement.linear(2), 64), 16)
    phases: Rows = [[3 * s + kind for kind in range(3) for _ in range(16)] for s in range(2)]
    assert extension.of(phases) is None
    one_by_one: Rows = [[0, 1, 2] * 16, [3, 4, 5] * 16]
    assert extension.of(one_by_one) == [[0, 1, 2] * 64, [3, 4, 5] * 64]


def test_a_part_is_only_repeated_if_it_repeats_already() -> None:
    """Each pair of microbatches could be repeated, but every pair is different."""
    extension = Extension(problem_of(Placement.linear(1), 72), 12)
    pairs = ("012012", "001122", "001212", "010122", "010212", "001122")
    assert extension.of([[int(code) for pair in pairs for code in pair]]) is None


def test_a_rank_that_waits_in_the_repeated_part_is_noticed() -> None:
    extension = Extension(problem_of(Placement.linear(2), 64), 16)
    work = 48 * sum(TIMES[:3])
    assert extension.never_waits(1000.0, 1000.0 + work)
    assert not extension.never_waits(1000.0, 1000.0 + 1.001 * work)


@pytest.mark.full
@pytest.mark.parametrize(
    ("limit", "searched"),
    [(RANKS / 3, [108, 288]), (RANKS, [108]), (1.5 * RANKS, [288])],
    ids=["tight", "1F1B", "roomy"],
)
def test_all_microbatches_are_searched_where_it_matters(
    limit: float, searched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With less memory than 1F1B's the steady state has waits, with much more there may be none."""
    found, search = [], auto._search

    def recorded(problems: list[Problem], *rest: object) -> object:
        found.append(problems[0].num_microbatches)
        return search(problems, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(auto, "_search", recorded)
    zb_auto(*figures(RANKS), RANKS, MICROBATCHES, limit, effort=0.02)
    assert found == searched


@settings(deadline=None, max_examples=25)
@given(
    num_ranks=st.integers(2, 5),
    times=st.tuples(*[st.floats(1, 3)] * 3, st.floats(0, 1)),
    limit=st.floats(0.5, 2),
    is_vee=st.booleans(),
)
def test_extended_rows_fit_in_the_same_memory_and_cost_at_least_their_work(
    num_ranks: int, times: tuple[float, float, float, float], limit: float, is_vee: bool
) -> None:
    placement = Placement.vee(num_ranks) if is_vee else Placement.linear(num_ranks)
    costs, memory = figures(num_ranks, times)
    most = (max(1.0, limit * num_ranks),) * num_ranks
    few, many = 4 * num_ranks + 8, 4 * num_ranks + 68
    short = zb_auto(costs, memory, num_ranks, few, most, placement="vee" if is_vee else "linear", effort=0.05)
    extension = Extension(Problem.of(Workload(placement, many), costs, memory, most, "span"), few)
    rows = extension.short.rows(short)
    cost = Extension(extension.short, few).cost(rows)
    longer = extension.of(rows)
    if longer is not None:
        schedule = extension.problem.schedule("extended", longer)
        validate(schedule)
        timeline = simulate(schedule, costs.fit(placement), memory.fit(placement))
        assert max(most_kept(timeline, memory.fit(placement))) <= most[0] * (1 + 1e-9)
        assert extension.cost(longer) == pytest.approx(timeline.span_ms)
        assert extension.cost(longer) >= extension.least(cost) - 1e-6


@pytest.mark.full
@pytest.mark.parametrize("limit", [RANKS / 3, 0.75 * RANKS, RANKS])
def test_planning_as_few_loses_nothing(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    costs, memory = figures(RANKS)

    def plan() -> float:
        schedule = zb_auto(costs, memory, RANKS, MICROBATCHES, limit, effort=0.5)
        validate(schedule)
        on = schedule.placement
        timeline = simulate(schedule, costs.fit(on), memory.fit(on))
        assert max(most_kept(timeline, memory.fit(on))) <= limit * (1 + 1e-9)
        return timeline.span_ms

    as_few = plan()
    monkeypatch.setattr(auto, "enough", lambda num_ranks, num_microbatches: num_microbatches)
    assert as_few <= plan() * 1.0005

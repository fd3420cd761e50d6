"""Tests of the search with more memory than 1F1B needs."""

from __future__ import annotations

from itertools import accumulate

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement, simulate
from megatron.zero_bubble.core.analysis.bounds import lower_bound
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search import zb_auto
from megatron.zero_bubble.core.search.problem import Problem
from megatron.zero_bubble.core.search.seeds import steep, zb_v
from megatron.zero_bubble.core.search.steep import steep_draft
from tests.helpers.rows import some


def question(p: int, share: float, placement: Placement | None = None) -> Problem:
    on = placement or Placement.vee(p)
    costs, memory = PassCosts.uniform(on, 10.0, 10.0, 10.0), PassMemory.uniform(on)
    return Problem.of(Workload(on, 2 * p), costs, memory, (share * p,) * p, "span")


PROFILES = [
    ((29.7, 29.4, 19.9, 0.53), 0.4325, 2.0, 0.01),
    ((18.5, 18.1, 9.3, 0.6), 1.0, 2.0, 0.01),
    ((18.5, 18.1, 9.3, 0.6), 1.0, 1.5, 0.1),
    ((11.35, 11.25, 8.13, 0.38), 1.0, 1.5, 0.5),
    ((18.5, 18.1, 9.3, 0.6), 0.4325, 1.5, 1.2),
    ((29.7, 29.4, 19.9, 0.53), 0.4325, 1.5, 0.6),
]


@pytest.mark.parametrize(
    ("times", "wgrad_memory", "share", "points"),
    some(PROFILES, PROFILES[0], PROFILES[3]),
)
def test_memory_beyond_that_of_1f1b_is_used_on_many_ranks(
    times: tuple[float, ...], wgrad_memory: float, share: float, points: float
) -> None:
    """On 32 ranks, the bubble was 0.7 to 3.1 points above the bound, 0.8 and 1.6 for the last two."""
    p, m = 32, 64
    on = Placement.vee(p)
    costs, memory = PassCosts.uniform(on, *times), PassMemory.uniform(on, 1.0, wgrad_memory)
    timeline = simulate(zb_auto(costs, memory, p, m, share * p, placement="vee"), costs, memory)
    assert max(timeline.peak_activation) <= share * p + 1e-6
    assert 100 * lower_bound(costs, memory, Workload(on, m), share * p).gap(timeline.span_ms) <= points


@pytest.mark.full
def test_many_ranks_start_from_what_was_best_on_a_part_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a miniature, the budget ends before the best seeds were tried, and the bubble has two more points."""
    p, on = 128, Placement.vee(128)
    costs, memory = PassCosts.uniform(on, 29.7, 29.4, 19.9, 0.53), PassMemory.uniform(on)
    problem = Problem.of(Workload(on, 2 * p), costs, memory, (1.5 * p,) * p, "span")

    def cost() -> float:
        draft = steep_draft(problem, 0.5)
        assert draft is not None
        return draft.cost

    found = cost()
    monkeypatch.setattr("megatron.zero_bubble.core.search.steep._MINIATURE_RANKS", p)
    assert found < 0.99 * cost()


@pytest.mark.parametrize(
    "problem",
    [question(4, 1.0), question(4, 0.75), question(4, 2.0, Placement.linear(4))],
    ids=["1p", "3/4p", "linear"],
)
def test_steep_seeds_are_for_a_v_with_more_memory_than_1f1b(problem: Problem) -> None:
    assert not list(steep(problem))
    assert steep_draft(problem, 1.0) is None


@pytest.mark.parametrize(("share", "slopes"), [(1.5, [9, 10, 8]), (2.0, [12, 11, 10])])
def test_the_steep_block_that_uses_just_the_memory_comes_first(share: float, slopes: list[int]) -> None:
    blocks = [seed.keywords for seed in steep(question(8, share)) if "down" in seed.keywords]
    assert [block["down"] + block["up"] for block in blocks[:3]] == slopes


@pytest.mark.parametrize("stretch", [1.0, 1.25, 1.5])
def test_a_stretched_zb_v_has_as_many_times_the_microbatches_in_flight(stretch: float) -> None:
    p = 8
    rows = zb_v(question(p, 2.0).shortened(4 * p), stretch)
    peaks = [max(accumulate((1, 0, -1)[code % 3] for code in row)) for row in rows]
    assert max(peaks) == pytest.approx(2 * p * stretch, abs=2)

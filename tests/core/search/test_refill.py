"""Tests of how eagerly W passes fill gaps."""

from __future__ import annotations

from itertools import islice

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search.portfolio import Derivation, PricedRows, Workbench
from megatron.zero_bubble.core.search.problem import F, Problem, Rows, W
from megatron.zero_bubble.core.search.refill import Eagerness, refill
from megatron.zero_bubble.core.search.seeds import zb_v
from megatron.zero_bubble.core.search.steep import FilledRows, tuned

UNLIMITED = float("inf")


def question(p: int, m: int) -> Problem:
    on = Placement.vee(p)
    costs, memory = PassCosts.uniform(on, 18.5, 18.1, 9.3, 0.6), PassMemory.uniform(on, 1.0, 0.4325)
    return Problem.of(Workload(on, m), costs, memory, (1.5 * p,) * p, "span")


def num_wgrads(row: list[int]) -> tuple[int, int]:
    """The number of W passes before the last F, and after it but before the last B."""
    last_f = max(index for index, code in enumerate(row) if code % 3 == F)
    last_b = max(index for index, code in enumerate(row) if code % 3 != W)
    return sum(code % 3 == W for code in row[:last_f]), sum(code % 3 == W for code in row[last_f:last_b])


def test_the_share_changes_evenly_from_the_first_rank_to_the_last() -> None:
    eagerness = Eagerness(0.0, 1.0, 0.5, 0.25)
    assert [eagerness.on(rank, 5) for rank in (0, 2, 4)] == [(0.0, 0.5), (0.5, 0.375), (1.0, 0.25)]
    assert Eagerness.even(0.6).on(3, 5) == (0.6, 0.6)
    assert eagerness.on(0, 1) == (0.0, 0.5)


def filled(problem: Problem, eagerness: Eagerness) -> Rows:
    rows = refill(problem, zb_v(problem), eagerness, UNLIMITED)
    assert rows is not None
    return rows


def test_warm_and_cool_gaps_are_filled_separately() -> None:
    problem = question(8, 16)
    never = filled(problem, Eagerness.even(9.0))
    warm = filled(problem, Eagerness(0.0, 0.0, 9.0, 9.0))
    cool = filled(problem, Eagerness(9.0, 9.0, 0.0, 0.0))
    for of_never, of_warm, of_cool in zip(*(map(num_wgrads, rows) for rows in (never, warm, cool)), strict=True):
        assert of_warm[0] >= of_never[0] == of_cool[0]
    assert sum(num_wgrads(row)[0] for row in warm) > sum(num_wgrads(row)[0] for row in never)
    assert sum(num_wgrads(row)[1] for row in cool) > sum(num_wgrads(row)[1] for row in never)


def test_eagerness_that_differs_by_rank_and_time_is_better_than_any_that_does_not() -> None:
    problem = question(16, 64)
    workbench = Workbench(problem, UNLIMITED)
    (found,) = islice(workbench.derive(Derivation(zb_v, 0.0, None, 1)), 1, 2)

    def cost(eagerness: Eagerness) -> float:
        other: PricedRows | None = workbench.filled(found, eagerness, UNLIMITED)
        return UNLIMITED if other is None else other.cost

    best_even = min(cost(Eagerness.even(share / 20)) for share in range(21))
    assert cost(Eagerness(0.2, 0.5, 0.3, 0.6)) < best_even


@pytest.mark.parametrize("num_ranks", [4, 16])
def test_tuning_never_lengthens_and_more_tries_help(num_ranks: int) -> None:
    workbench = Workbench(question(num_ranks, 2 * num_ranks), UNLIMITED)
    (found,) = islice(workbench.derive(Derivation(zb_v, 0.0, None, 1)), 1, 2)
    filled = FilledRows(zb_v, 0.0, Eagerness.even(0.6), found)
    few, many = tuned(workbench, filled, 0, 0), tuned(workbench, filled, 2, 40)
    assert many.found.cost < few.found.cost <= found.cost
    assert tuned(workbench, many, 0, 10).found.cost <= many.found.cost
    assert many.way != few.way

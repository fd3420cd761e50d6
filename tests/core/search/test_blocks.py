"""Building blocks that are fitted to the memory limit."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, PassMemory, Placement
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search.blocks import Bent, Thinned, vee_block
from megatron.zero_bubble.core.search.problem import Problem, Rows

V_MIN, V_HALF = (1, 1, 0, 1), (2, 1, 3, 2)


def problem(num_ranks: int, num_microbatches: int, limit: float) -> Problem:
    on = Placement.vee(num_ranks)
    costs, memory = PassCosts.uniform(on, 1, 1, 1), PassMemory.uniform(on, 1.0, 1.0)
    return Problem.of(Workload(on, num_microbatches), costs, memory, (limit,) * num_ranks, "span")


def peak(question: Problem, rows: Rows) -> float:
    return max(max(accumulate(question.tables.delta[code] for code in row)) for row in rows)


@given(st.integers(2, 12), st.integers(1, 40), st.integers(1, 12))
@settings(max_examples=40)
def test_every_pass_is_there_once(num_ranks: int, num_microbatches: int, more: int) -> None:
    question = problem(num_ranks, num_microbatches, float(num_microbatches))
    for block in (Thinned(*V_MIN), Bent(1, 2, 1, 0, 1)):
        rows = block.rows(question, min(more, num_ranks))
        codes = Counter(code for row in rows for code in row)
        assert codes == dict.fromkeys(range(6 * num_ranks), num_microbatches)


def test_runs_of_one_microbatch_leave_every_second_period_empty() -> None:
    question = problem(4, 6, 6.0)
    assert Thinned(*V_MIN).rows(question, 0) == vee_block(question, 12, 1, 1, 0, 1)


@pytest.mark.parametrize("block", [Thinned(*V_MIN), Thinned(*V_HALF), Bent(1, 2, 1, 0, 1), Bent(2, 4, 2, 0, 1)])
def test_the_densest_rows_that_fit(block: Thinned | Bent) -> None:
    p, m = 16, 48
    peaks = [peak(question := problem(p, m, float(m)), block.rows(question, more)) for more in range(p + 1)]
    assert peaks == sorted(peaks), "rows with more need at least as much memory"
    for limit in (peaks[p], (peaks[0] + peaks[p]) / 2, peaks[0]):
        question = problem(p, m, limit)
        fitting = max(more for more in range(p + 1) if peaks[more] <= limit)
        assert block(question) == block.rows(question, fitting)


def test_a_block_that_fits_is_not_thinned() -> None:
    question = problem(8, 24, 24.0)
    assert Thinned(*V_HALF)(question) == vee_block(question, 6, *V_HALF)

"""zb-auto: valid under any costs, within its limit, and never worse than the schedules written by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, PassMemory, Placement, build, simulate
from megatron.zero_bubble.analysis.validate import validate
from megatron.zero_bubble.search import zb_auto

milliseconds = st.floats(1.0, 50.0)


@settings(max_examples=5)
@given(st.integers(1, 4), st.integers(1, 8), st.data())
def test_what_it_returns_is_valid_and_fits(num_ranks: int, num_microbatches: int, data: st.DataObject) -> None:
    per_stage = st.lists(milliseconds, min_size=num_ranks, max_size=num_ranks).map(tuple)
    costs = PassCosts(data.draw(per_stage), data.draw(per_stage), data.draw(per_stage), data.draw(st.floats(0, 5)))
    memory = PassMemory((1.0,) * num_ranks, (data.draw(st.floats(0.1, 1.0)),) * num_ranks)
    limit = data.draw(st.floats(1.0, 2.0 * num_ranks))
    schedule = zb_auto(costs, memory, num_ranks, num_microbatches, limit, placement="linear")
    validate(schedule)
    assert max(simulate(schedule, costs, memory).peak_activation) <= limit + 1e-9


@pytest.mark.parametrize(("name", "limit"), [("zb-h1", 4.0), ("zb-h2", 7.0)])
@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_it_is_never_worse_than_the_handcrafted_schedule_in_its_memory(name: str, limit: float, objective: str) -> None:
    placement = Placement.linear(4)
    costs = PassCosts.uniform(placement, 18.522, 18.086, 9.337, 0.601)
    ours = zb_auto(costs, PassMemory.uniform(placement), 4, 12, limit, placement="linear", objective=objective)
    theirs = build(name, num_ranks=4, num_microbatches=12)
    figures = [getattr(simulate(schedule, costs), f"{objective}_ms") for schedule in (ours, theirs)]
    assert figures[0] <= figures[1] + 1e-6


def test_a_limit_that_admits_nothing_names_the_least_that_does() -> None:
    placement = Placement.linear(2)
    costs, memory = PassCosts.uniform(placement, 1, 1, 1), PassMemory.uniform(placement)
    with pytest.raises(ValueError, match="needs 1 on the fullest rank"):
        zb_auto(costs, memory, 2, 4, 0.5, placement="linear")


def test_the_same_question_has_the_same_answer() -> None:
    placement = Placement.vee(2)
    costs, memory = PassCosts.uniform(placement, 3, 4, 2, 0.5), PassMemory.uniform(placement)
    assert zb_auto(costs, memory, 2, 6, 2.0) == zb_auto(costs, memory, 2, 6, 2.0)

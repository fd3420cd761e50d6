"""Costs derived from recorded iterations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, Slices, build, simulate
from megatron.zero_bubble.measure.gather import attention_share, median_costs
from tests.helpers.strategies import costs_for, cuts


@given(st.data())
def test_costs_of_a_run_are_those_that_it_was_simulated_with(data: st.DataObject) -> None:
    slices = data.draw(cuts)
    schedule = build("seq-zb-h1", num_ranks=3, num_microbatches=2, num_slices=slices)
    costs = data.draw(costs_for(schedule))
    found = median_costs([simulate(schedule, costs)])
    assert found.forward_ms == pytest.approx(costs.forward_ms)
    assert found.backward_ms == pytest.approx(costs.backward_ms)
    assert found.wgrad_ms == pytest.approx(costs.wgrad_ms)
    if len(slices) > 1:
        assert found.forward_attention == pytest.approx(costs.forward_attention, abs=1e-6)
        assert found.backward_attention == pytest.approx(costs.backward_attention, abs=1e-6)
    else:
        assert found.forward_attention == (0.0,) * 3, "one slice says nothing about attention"


def test_share_of_attention_is_between_0_and_1() -> None:
    assert attention_share([9.0, 1.0], Slices.even(2)) == 0.0
    assert attention_share([0.0, 9.0], Slices.even(2)) == 1.0
    assert attention_share([1.0, 3.0], Slices.even(2)) == pytest.approx(1.0)
    assert attention_share([5.0, 7.0], Slices.even(2)) == pytest.approx(1 / 3)


def test_fused_backwards_count_as_b() -> None:
    schedule = build("seq-1f1b", num_ranks=2, num_microbatches=2, num_slices=2)
    found = median_costs([simulate(schedule, PassCosts((1.0,) * 2, (2.0,) * 2, (3.0,) * 2))])
    assert (found.backward_ms, found.wgrad_ms) == ((5.0, 5.0), (0.0, 0.0))

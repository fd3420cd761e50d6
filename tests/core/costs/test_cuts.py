"""Cuts of sequences by the time of their slices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import Kind, Pass, PassCosts, Placement, Slices, build, simulate
from megatron.zero_bubble.core.costs.cuts import balanced, default_cuts

LINEAR = Placement.linear(8)
TABLE = {
    # Share of attention: bubbles of even cuts with 4 and 8 slices, fused and split, then of balanced cuts, and how much
    # longer than an even slice the longest one is. From simulations that are independent of this package.
    0.0: (0.179, 0.068, 0.099, 0.035, 0.179, 0.068, 0.099, 0.035, 1.0, 1.0),
    0.1: (0.231, 0.113, 0.164, 0.063, 0.179, 0.093, 0.099, 0.050, 1.08, 1.09),
    0.3: (0.317, 0.211, 0.269, 0.158, 0.179, 0.131, 0.099, 0.074, 1.26, 1.33),
    0.5: (0.386, 0.323, 0.351, 0.285, 0.179, 0.157, 0.099, 0.090, 1.46, 1.66),
    0.8: (0.467, 0.449, 0.444, 0.425, 0.179, 0.177, 0.099, 0.101, 1.79, 2.32),
}


def with_attention(share: float) -> PassCosts:
    """Attention takes ``share`` of F and twice as long in B; a product of matrices takes equally long in F, B and W."""
    return PassCosts.uniform(LINEAR, 1.0, 1.0 + share, 1.0 - share, attention=share)


@pytest.mark.parametrize("share", TABLE)
def test_bubbles_of_even_and_balanced_cuts(share: float) -> None:
    costs = with_attention(share)
    found: list[float] = []
    for cuts in (Slices.even, lambda number: balanced(costs, number)):
        for number in (4, 8):
            for name in ("seq-1f1b", "seq-zb-h1"):
                schedule = build(name, num_ranks=8, num_microbatches=8, num_slices=cuts(number))
                found.append(simulate(schedule, costs).bubble_rate("makespan"))
    assert found == pytest.approx(TABLE[share][:8], abs=5.01e-4)
    longest = [max(balanced(costs, number).shares) * number for number in (4, 8)]
    assert longest == pytest.approx(TABLE[share][8:], abs=5.01e-3)


def test_balanced_cuts_keep_the_closed_form_at_a_large_share_of_attention() -> None:
    costs = with_attention(0.8)
    for number in (4, 8):
        schedule = build("seq-1f1b", num_ranks=8, num_microbatches=8, num_slices=balanced(costs, number))
        closed = 7 / number / (8 + 7 / number)
        assert simulate(schedule, costs).bubble_rate("makespan") == pytest.approx(closed, abs=0.01)


@given(share=st.floats(0.01, 1.0), number=st.integers(1, 12), wgrad_ms=st.floats(0.0, 5.0))
def test_balanced_slices_take_equal_time(share: float, number: int, wgrad_ms: float) -> None:
    costs = PassCosts.uniform(Placement.linear(2), 3.0, 7.0, wgrad_ms, attention=share)
    slices = balanced(costs, number)
    times = [
        sum(costs.duration(Pass(stage, kind, 0, at), slices) for stage in (0, 1) for kind in (Kind.F, Kind.BW))
        for at in range(number)
    ]
    assert times == pytest.approx([sum(times) / number] * number)
    assert list(slices.shares) == sorted(slices.shares, reverse=True)


def test_default_cuts_are_balanced_for_much_attention() -> None:
    assert default_cuts(PassCosts.uniform(LINEAR, 1.0, 1.0, 1.0, attention=0.05), 4).are_even
    assert not default_cuts(PassCosts.uniform(LINEAR, 1.0, 1.0, 1.0, attention=0.3), 4).are_even
    # Of 2 ms of F and B together, attention takes 1 + 2 times its share of F.
    assert default_cuts(PassCosts.uniform(LINEAR, 1.0, 1.0, 1.0, attention=0.066), 4).are_even
    assert not default_cuts(PassCosts.uniform(LINEAR, 1.0, 1.0, 1.0, attention=0.067), 4).are_even
    assert balanced(PassCosts.uniform(LINEAR, 1.0, 1.0, 1.0), 4) == Slices.even(4)

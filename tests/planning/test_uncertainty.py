"""Tests of the range of a predicted gain."""

from __future__ import annotations

import pytest

from megatron.zero_bubble import PassCosts, Placement, build
from megatron.zero_bubble.planning.uncertainty import gains

LINE = Placement.linear(4)


def test_gain_of_zb_h1_depends_on_the_weight_gradients() -> None:
    """1F1B takes (m + p - 1)(F + B + W), ZB-H1 (p - 1)W less than (p - 1)(F + B + W) of it in idle time."""
    stock, own = (build(name, num_ranks=4, num_microbatches=8) for name in ("1f1b", "zb-h1"))
    costs = PassCosts.uniform(LINE, 1.0, 1.0, 1.0)
    least, most = gains((stock, costs), (own, costs), "makespan")
    assert least < 6 / 33 < most
    assert gains((stock, costs), (stock, costs), "makespan") == (0.0, 0.0)


def test_transfers_are_varied_on_every_link() -> None:
    stock = build("1f1b", num_ranks=4, num_microbatches=8)
    slow, fast = (PassCosts.uniform(LINE, 1.0, 1.0, 1.0, ms) for ms in (1.0, 0.0))
    least, most = gains((stock, slow), (stock, fast), "makespan")
    linked = PassCosts.uniform(LINE, 1.0, 1.0, 1.0)
    linked = PassCosts(
        *(getattr(linked, f"{name}_ms") for name in ("forward", "backward", "wgrad")),
        0.0,
        {(a, b): 1.0 for a in range(4) for b in range(4) if a != b},
    )
    assert gains((stock, linked), (stock, fast), "makespan") == pytest.approx((least, most))
    assert most - least > 0.02

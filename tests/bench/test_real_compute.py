"""Which rounds of a noisy machine tell what a schedule gains."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/bench"))

from real_compute import in_even_rounds


def test_rounds_in_which_a_rank_was_slower_are_left_out() -> None:
    even, slow_rank, slow_stock = [100.0, 105.0], [100.0, 125.0], [130.0, 130.0]
    times, stock = [8.0, 9.0, 7.0, 6.0], [10.0, 10.0, 10.0, 10.0]
    work, stocks = [even, slow_rank, even, even], [even, even, slow_stock, [95.5, 100.0]]
    assert in_even_rounds(times, stock, work, stocks) == [0.8, 0.6]


def test_no_round_need_be_even() -> None:
    assert in_even_rounds([1.0], [1.0], [[1.0, 2.0]], [[1.0, 1.0]]) == []

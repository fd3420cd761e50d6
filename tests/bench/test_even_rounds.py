"""Which rounds of a noisy machine tell what a schedule gains."""

from __future__ import annotations

from bench.even_rounds import in_even_rounds


def test_rounds_in_which_a_rank_was_slower_than_usual_are_left_out() -> None:
    usual, other = [100.0, 150.0], [130.0, 90.0]  # stages differ, and so may the schedules' work
    slow_rank, slow_stock, all_slow = [100.0, 180.0], [150.0, 90.0], [[200.0, 290.0], [260.0, 180.0]]
    times, stock = [8.0, 8.5, 9.0, 7.0, 6.0], [10.0] * 5
    work = [usual, usual, slow_rank, usual, all_slow[0]]
    stocks = [other, other, other, slow_stock, all_slow[1]]
    assert in_even_rounds(times, stock, work, stocks) == [0.8, 0.85, 0.6]


def test_no_round_need_be_even() -> None:
    work = [[1.0, 2.0], [2.0, 1.0], [1.0, 2.0], [2.0, 1.0]]
    assert in_even_rounds([1.0] * 4, [1.0] * 4, work, [[1.0, 1.0]] * 4) == []

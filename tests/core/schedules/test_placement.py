"""Placements: which rank has which stages."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement


def test_wave_of_two_stages_per_rank_is_a_vee() -> None:
    assert Placement.wave(3, 2) == Placement.vee(3)


def test_wave_runs_to_the_last_rank_and_back_again() -> None:
    wave = Placement.wave(3, 4)

    assert wave.stage_to_rank == (0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0)
    assert [wave.stages_of(rank) for rank in range(3)] == [(0, 5, 6, 11), (1, 4, 7, 10), (2, 3, 8, 9)]


def test_wave_with_an_odd_number_of_stages_is_refused() -> None:
    with pytest.raises(UserError, match=r"must be even; got 3; give 4, or use a loop"):
        Placement.wave(2, 3)

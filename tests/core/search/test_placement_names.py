"""Names of placements: every name stands for one placement, and every placement has at most one name."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.search.placements import HAS_CHUNKS, PLACEMENTS, label_of, name_of

NAMED = {
    "linear": Placement.linear(3),
    "vee": Placement.vee(3),
    "loop x2": Placement.interleaved(3, 2),
    "loop x5": Placement.interleaved(3, 5),
    "wave x4": Placement.wave(3, 4),
    "another one": Placement((0, 2, 1)),
}


@pytest.mark.parametrize("label", NAMED)
def test_a_placement_has_the_name_that_makes_it(label: str) -> None:
    on = NAMED[label]
    name = name_of(on)
    assert label_of(on) == label
    assert (name or "another one") == label.split(" x", maxsplit=1)[0]
    assert name is None or PLACEMENTS[name](3, on.num_stages // 3) == on


def test_on_one_rank_the_simplest_name_is_taken() -> None:
    assert [name_of(Placement((0,) * count)) for count in (1, 2, 3)] == ["linear", "vee", "loop"]


def test_stages_uneven_over_the_ranks_have_no_name() -> None:
    assert name_of(Placement((0, 1, 0))) is None


def test_loops_and_waves_have_a_choice_of_stages() -> None:
    assert HAS_CHUNKS == ("loop", "wave")

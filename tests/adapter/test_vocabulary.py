"""Vocabulary parallelism against stock megatron-core: equal up to rounding, in float32."""

from __future__ import annotations

import pytest

from tests.adapter.test_parity import ROPE, UNTIED
from tests.helpers.parity import Layout
from tests.helpers.ranks import RankPool
from tests.helpers.slices import Difference
from tests.helpers.vocabulary import differences

ALGORITHMS = [f"{name} --zero-bubble-vocabulary-parallel {number}" for name in ("1f1b", "zb-h1") for number in (1, 2)]

ROWS = {
    "untied": (Layout(2), 3, f"{UNTIED} {ROPE}", ALGORITHMS),
    "tied, learned positions": (Layout(2), 3, "", ALGORITHMS),
}


def check(found: list[list[Difference]]) -> None:
    """Check the differences of all schedules on all ranks."""
    for of_rank in found:
        for difference in of_rank:
            assert difference.losses <= 5e-7 and difference.worst <= 2e-6, found


@pytest.mark.parametrize("name", ROWS)
def test_gradients_equal_those_of_whole_layers(ranks: RankPool, name: str) -> None:
    layout, num_microbatches, options, schedules = ROWS[name]
    check(ranks.run(layout.num_ranks, differences, layout.flags(num_microbatches, options), schedules, timeout=120))

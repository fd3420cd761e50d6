"""Microbatches of different lengths train as under stock Megatron, bit for bit, with headers and with known shapes."""

from __future__ import annotations

from itertools import product

import pytest

from tests.helpers.ranks import RankPool
from tests.loops.varied import KINDS, SCHEDULES, differences, outcomes, runs_of

DEFAULT = (2, "zb-v", "packed")


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "kind"),
    [pytest.param(*row, marks=() if row == DEFAULT else pytest.mark.full) for row in product((2, 4), SCHEDULES, KINDS)],
)
def test_losses_and_gradients_are_those_of_stock(ranks: RankPool, num_ranks: int, schedule: str, kind: str) -> None:
    runs = runs_of(schedule, kind)
    results = ranks.run(num_ranks, outcomes, runs, timeout=120)
    expected, *ours = zip(*results, strict=True)
    for (_, _, loop), got in zip(runs[1:], ours, strict=True):
        assert differences(expected, got) == [], loop.tells

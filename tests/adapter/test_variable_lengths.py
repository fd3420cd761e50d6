"""Microbatches of different lengths train as under stock Megatron, bit for bit, with headers and with known shapes."""

from __future__ import annotations

from itertools import product

import pytest

from tests.helpers.ranks import RankPool
from tests.loops.varied import ONE_STAGE, STAGES, TWO_STAGES, Loop, differences, outcomes

COUNTS = {"interleaved-1f1b": (4, 8)}
ANY_COUNTS = (5, 3, 6)


DEFAULT = (2, "zb-v", "packed")
MATRIX = list(product((2, 4), ("zb-h1", "zb-h2", "zb-v", "interleaved-1f1b"), ("dense", "packed")))


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "kind"),
    [pytest.param(*row, marks=() if row == DEFAULT else pytest.mark.full) for row in MATRIX],
)
def test_losses_and_gradients_are_those_of_stock(ranks: RankPool, num_ranks: int, schedule: str, kind: str) -> None:
    counts = COUNTS.get(schedule, ANY_COUNTS)
    virtual_size = STAGES.get(schedule, ONE_STAGE)
    stock = TWO_STAGES if schedule == "interleaved-1f1b" else ONE_STAGE
    runs = [(None, stock, Loop(kind, counts))]
    runs += [(schedule, virtual_size, Loop(kind, counts, tells)) for tells in ("nobody", "all", "first")]
    results = ranks.run(num_ranks, outcomes, runs, timeout=120)
    expected, *ours = zip(*results, strict=True)
    for (_, _, loop), got in zip(runs[1:], ours, strict=True):
        assert differences(expected, got) == [], loop.tells

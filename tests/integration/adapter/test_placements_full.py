"""The full parity matrix of ``test_parity_full.py`` for schedules with two stages per rank, an hour on two cores.

Rows with dropout are omitted: masks come from a rank's random state in the order of its F passes, which depends on the
placement. Rows with clipping are omitted because gradient norms are equal only up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.helpers.parity import Layout, assert_same_model, train
from tests.helpers.ranks import RankPool
from tests.integration.adapter.test_parity import DROPOUT
from tests.integration.adapter.test_parity_full import matrix

SCHEDULES = [None, "zb-v", "v-half", "v-min", "dualpipe-v", "interleaved-1f1b", "breadth-first"]

# The last option requires one stage per rank; test_uneven_layers_get_the_layout_with_the_least_work covers two stages.
_LEFT_OUT = (DROPOUT, "--clip-grad", "--decoder-first-pipeline-num-layers")


def _rows() -> Iterator[object]:
    for group, layout, count, options in matrix():
        if any(word in options for word in _LEFT_OUT):
            continue
        doubled = replace(layout, num_layers=2 * max(layout.num_layers, layout.pipeline))
        yield pytest.param(doubled, count, options, id=f"{group}: {layout.words} m={count} {options}")


@pytest.mark.full
@pytest.mark.parametrize(("layout", "num_microbatches", "options"), list(_rows()))
def test_same_model_as_stock(ranks: RankPool, layout: Layout, num_microbatches: int, options: str) -> None:
    results = ranks.run(layout.num_ranks, train, layout.flags(num_microbatches, options), SCHEDULES, timeout=240)
    assert_same_model(results, SCHEDULES, layout)

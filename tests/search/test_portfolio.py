"""The steps of the search for one placement."""

from __future__ import annotations

from functools import partial

import pytest

from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.ir import Placement
from megatron.zero_bubble.search.blocks import vee_block
from megatron.zero_bubble.search.portfolio import Derivation, Workbench
from megatron.zero_bubble.search.problem import Problem


@pytest.mark.parametrize("p", [16, 32, 64, 96])
def test_compaction_looks_as_far_ahead_as_a_warm_up_of_many_ranks_is_long(p: int) -> None:
    """With three quarters of 1F1B's memory, a block compacts to the least possible length (docs/planning.md)."""
    m, held = 2 * p, 3 * p // 2
    costs, memory = PassCosts.uniform(Placement.vee(p), 2.0, 2.0, 2.0), PassMemory.uniform(Placement.vee(p))
    bench = Workbench(Problem.of(Placement.vee(p), m, costs, memory, (held / 2,) * p, "span"), 1e12)
    seed = partial(vee_block, period=6, down=1, up=2, top=0, bottom=1)
    steps = [found.cost for found in bench.derive(Derivation(seed, 0.0, None, 3))]
    assert min(steps) == 6 * m + 6 * p - 3 * held - 1

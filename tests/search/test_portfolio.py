"""The steps of the search for one placement."""

from __future__ import annotations

from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.ir import Placement
from megatron.zero_bubble.search.blocks import Bent
from megatron.zero_bubble.search.portfolio import Derivation, Workbench
from megatron.zero_bubble.search.problem import Problem


def test_the_best_rows_of_many_ranks_are_compacted_until_this_no_longer_helps() -> None:
    p, m = 96, 100
    costs, memory = PassCosts((29.7,) * p, (29.4,) * p, (19.9,) * p, 0.53), PassMemory((1.0,) * p, (0.4325,) * p)
    bench = Workbench(Problem.of(Placement.vee(p), m, costs, memory, (0.75 * p,) * p, "span"), 1e12)
    *_, found = bench.derive(Derivation(Bent(1, 4, 2, 3, 2), 0.0, None, 4))
    steps = [step.cost for step in bench.condensed(found)]
    assert len(steps) > 2
    assert min(steps) < 0.995 * found.cost
    assert steps[-1] >= steps[-3] - 1e-6

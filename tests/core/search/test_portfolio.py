"""The steps of the search for one placement."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search.blocks import vee_block
from megatron.zero_bubble.core.search.evaluate import INFEASIBLE
from megatron.zero_bubble.core.search.portfolio import Derivation, PricedRows, Workbench, draft
from megatron.zero_bubble.core.search.problem import Problem


@pytest.mark.parametrize("p", [16, 32, 64, 96])
def test_compaction_looks_as_far_ahead_as_a_warm_up_of_many_ranks_is_long(p: int) -> None:
    """With three quarters of 1F1B's memory, a block compacts to the least possible length."""
    m, held = 2 * p, 3 * p // 2
    costs, memory = PassCosts.uniform(Placement.vee(p), 2.0, 2.0, 2.0), PassMemory.uniform(Placement.vee(p))
    bench = Workbench(Problem.of(Workload(Placement.vee(p), m), costs, memory, (held / 2,) * p, "span"), 1e12)
    seed = partial(vee_block, period=6, down=1, up=2, top=0, bottom=1)
    steps = [found.cost for found in bench.derive(Derivation(seed, 0.0, None, 3))]
    assert min(steps) == 6 * m + 6 * p - 3 * held - 1


def polished(monkeypatch: pytest.MonkeyPatch, problem: Problem, least: float) -> tuple[int, float]:
    """The number of changes that the local search tries, and the cost of the best rows."""
    tries, refined = 0, Workbench.refined

    def counting(bench: Workbench, found: PricedRows, passes: float, *args: Any) -> PricedRows:
        nonlocal tries
        tries += max(0, int(min(passes, bench.left)))
        return refined(bench, found, passes, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Workbench, "refined", counting)
        best = min(cost for cost, _ in draft(problem, 1.0, (), least).polish())
    return tries, best


@pytest.mark.parametrize("p", [2, 3])
def test_the_search_ends_at_a_bound(p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages are unequal, so that some rank waits in every schedule, and only a bound ends the search."""
    on = Placement.vee(p)
    costs = PassCosts(tuple(4.0 + stage for stage in range(2 * p)), (5.0,) * 2 * p, (3.0,) * 2 * p, 0.4)
    memory = PassMemory.uniform(on)
    problem = Problem.of(Workload(on, 5), costs, memory, (float(p),) * p, "makespan")
    many, cost = polished(monkeypatch, problem, -INFEASIBLE)
    assert many > 0
    assert polished(monkeypatch, problem, cost) == (0, pytest.approx(cost))

"""The search with more memory than 1F1B needs: few seeds, but their W passes placed well.

Memory beyond that of 1F1B buys time: more F passes before the first B, so that neither transfers nor passes of unequal
length make the next rank wait. Only patterns with steep slopes have as many. Before W passes fill the waits that remain
they are longer than others, so the search from all seeds drops them where it cannot afford to refill every seed.
"""

from __future__ import annotations

from itertools import product

from megatron.zero_bubble.search.loops import compiled
from megatron.zero_bubble.search.portfolio import Derivation, Draft, Found, Workbench, distinct, merit
from megatron.zero_bubble.search.problem import Problem
from megatron.zero_bubble.search.seeds import steep

_BUDGET, _BUDGET_PER_PASS, _FULL_BUDGET_RANKS = (300_000, 20_000_000), (20, 1800), 64
"""The budget in placed passes, without and with the compiled loops: a constant, and a factor for the problem's size.
With more ranks than this, it grows only with the passes per rank.
"""
_TRIED, _SQUEEZED, _TIGHTENED = 0.5, 0.3, 0.15
"""Shares of the budget that are left after each of these steps; the rest is for polishing."""
_HASTES, _STEPS = (0.0, 0.6), 3
_FEW, _MANY = 1, 5
"""How often the range of targets is halved to choose seeds, and for the chosen ones."""
_CHOSEN = 6


def steep_draft(problem: Problem, effort: float) -> Draft | None:
    """Search from the steep seeds; None if there are none that fit in memory."""
    is_compiled = compiled() is not None
    passes = 3 * problem.num_stages * problem.num_microbatches
    per_pass = _BUDGET_PER_PASS[is_compiled] * min(1.0, _FULL_BUDGET_RANKS / problem.num_ranks)
    budget = effort * (_BUDGET[is_compiled] + per_pass * passes)
    workbench = Workbench(problem, budget)
    pool = []
    for seed, haste in product(steep(problem), _HASTES):
        if workbench.left < _TRIED * budget:
            break
        # Only what was compacted forward last: backward, it leaves its waits where no W is ready yet.
        for found in list(workbench.derive(Derivation(seed, haste, None, _STEPS)))[1::2]:
            pool.append(min((found, *workbench.squeezed(found, _FEW)), key=merit))
    for found in distinct(pool, _CHOSEN):
        if workbench.left > _SQUEEZED * budget:
            pool.append(min(workbench.squeezed(found, _MANY), default=found, key=merit))
    for found in distinct(pool, _CHOSEN):
        pool += _tightened(workbench, found, _TIGHTENED * budget)
    return Draft(workbench, pool) if pool else None


def _tightened(workbench: Workbench, found: Found, floor: float) -> list[Found]:
    """Compact ``found`` and squeeze the result, again and again, until this no longer helps or the budget is down to
    ``floor``.
    """
    steps: list[Found] = []
    while workbench.left > floor:
        dense = list(workbench.dense(found))
        better = min((other for one in dense for other in workbench.squeezed(one, _MANY)), default=found, key=merit)
        if better.cost >= found.cost:
            break
        steps.append(better)
        found = better
    return steps

"""The search with more memory than 1F1B needs: few seeds, but their W passes placed well.

Memory beyond that of 1F1B buys time: more F passes before the first B, so that neither transfers nor passes of unequal
length make the next rank wait. Only patterns with steep slopes have as many. Before W passes fill the waits that remain
they are longer than others, so the search from all seeds drops them where it cannot afford to refill every seed.

How eagerly W passes should fill gaps depends on the costs, the memory, the rank and the time. It is *tuned* for the
most promising rows: a random change of its figures stays if the rows become shorter.
"""

from __future__ import annotations

from itertools import product

from megatron.zero_bubble.search.dice import Dice
from megatron.zero_bubble.search.evaluate import INFEASIBLE
from megatron.zero_bubble.search.loops import compiled
from megatron.zero_bubble.search.portfolio import Derivation, Draft, Found, Workbench, distinct, merit
from megatron.zero_bubble.search.problem import Problem
from megatron.zero_bubble.search.refill import Eagerness
from megatron.zero_bubble.search.seeds import steep

_BUDGET, _BUDGET_PER_PASS, _FULL_BUDGET_RANKS = (300_000, 60_000_000), (20, 1800), 64
"""The budget in placed passes, without and with the compiled loops: a constant, and a factor for the problem's size.
With more ranks than this, it grows only with the passes per rank.
"""
_TRIED, _TUNED, _TIGHTENED = 0.5, 0.25, 0.1
"""Shares of the budget that are left after each of these steps; the rest is for polishing."""
_HASTES, _STEPS = (0.0, 0.6), 3
_EAGERNESSES = Eagerness(0.2, 0.5, 0.3, 0.6), Eagerness(0.0, 0.4, 0.3, 0.6), Eagerness(0.0, 0.0, 0.0, 1.0)
"""The ways to fill gaps that are tried first."""
_FEW, _MANY, _TIGHT = (2, 0), (4, 30), (4, 0)
"""How often the range of targets is halved, and the number of random changes: to choose seeds, for the chosen ones, and
after every compaction.
"""
_CHANGED, _STEP = 0.5, 0.5
"""Probability with which a figure changes, and the largest change of the first try; it falls to 0."""
_RETARGETED = 0.3
"""Probability of a new target, and that of none."""
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
            pool.append(tuned(workbench, found, *_FEW))
    for found in distinct(pool, _CHOSEN):
        if workbench.left > _TUNED * budget:
            pool.append(tuned(workbench, found, *_MANY))
    for found in distinct(pool, _CHOSEN):
        pool += _tightened(workbench, found, _TIGHTENED * budget)
    return Draft(workbench, pool) if pool else None


def tuned(workbench: Workbench, found: Found, halvings: int, tries: int) -> Found:
    """Return ``found`` with its W passes in the best places; ``found`` itself if none are better.

    A few ways to fill gaps are tried without a target, and for the middle between the targets missed and the best cost,
    again and again; then as many random changes of the best way as ``tries``.
    """
    best, way, target = found, _EAGERNESSES[0], INFEASIBLE
    work = max(workbench.problem.work)
    for eagerness in _EAGERNESSES:
        missed, reached, aim = work, INFEASIBLE, INFEASIBLE
        for _ in range(1 + halvings):
            other = workbench.filled(found, eagerness, aim)
            if other is None:
                break
            if merit(other) < merit(best):
                best, way, target = other, eagerness, aim
            reached = min(reached, other.cost)
            missed = aim if missed < aim < other.cost else missed
            aim = (missed + reached) / 2
    dice = Dice(0)
    for number in range(tries):
        step = _STEP * (1 - number / tries)
        eagerness = Eagerness(*(_changed(share, step, dice) for share in way))
        aim, fate = target, dice.uniform()
        if fate < _RETARGETED:
            aim = work + dice.uniform() * (best.cost - work)
        elif fate < 2 * _RETARGETED:
            aim = INFEASIBLE
        other = workbench.filled(found, eagerness, aim)
        if other is not None and merit(other) < merit(best):
            best, way, target = other, eagerness, aim
    return best


def _changed(share: float, step: float, dice: Dice) -> float:
    if dice.uniform() >= _CHANGED:
        return share
    return max(0.0, share + step * (2 * dice.uniform() - 1))


def _tightened(workbench: Workbench, found: Found, floor: float) -> list[Found]:
    """Compact ``found`` and tune the result, again and again, until this no longer helps or the budget is down to
    ``floor``.
    """
    steps: list[Found] = []
    while workbench.left > floor:
        dense = list(workbench.dense(found))
        better = min((tuned(workbench, one, *_TIGHT) for one in dense), default=found, key=merit)
        if better.cost >= found.cost:
            break
        steps.append(better)
        found = better
    return steps

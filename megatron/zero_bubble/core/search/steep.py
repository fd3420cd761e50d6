"""The search with more memory than 1F1B needs: few seeds, but their W passes placed well.

Memory beyond that of 1F1B buys time: more F passes before the first B, so that neither transfers nor passes of unequal
length make the next rank wait. Only patterns with steep slopes have as many. Before W passes fill the waits that remain
they are longer than others, so the search from all seeds drops them where it cannot afford to refill every seed.

How eagerly W passes should fill gaps depends on the costs, the memory, the rank and the time. It is *tuned* for the
most promising rows: a random change of its figures stays if the rows become shorter. Seeds and figures that are good on
a part of the ranks are good on all, so many ranks start from those of a miniature.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, product
from typing import NamedTuple

from megatron.zero_bubble.core.search.dice import Dice
from megatron.zero_bubble.core.search.evaluate import INFEASIBLE
from megatron.zero_bubble.core.search.loops import compiled
from megatron.zero_bubble.core.search.portfolio import Derivation, Draft, PricedRows, Workbench, distinct, merit
from megatron.zero_bubble.core.search.problem import Problem
from megatron.zero_bubble.core.search.refill import Eagerness
from megatron.zero_bubble.core.search.seeds import Seed, steep

_BUDGET, _BUDGET_PER_PASS, _FULL_BUDGET_RANKS = (300_000, 60_000_000), (20, 1000), 64
"""The budget in placed passes, without and with the compiled loops: a constant, and a factor for the problem's size.
With more ranks than this, it grows only with the passes per rank.
"""
_TRIED, _TUNED = 0.5, 0.2
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
_MINIATURE_RANKS = 32
_MANY_RANKS, _REST = 16, 0.1
"""With more ranks than this, and with more microbatches than ranks, the search from all seeds gets this share of its
budget if there are steep seeds: it hardly ever finds the shorter schedule.
"""


class FilledRows(NamedTuple):
    """Rows, the seed and the haste of their compactions, and how their gaps were filled."""

    seed: Seed
    haste: float
    way: Eagerness
    found: PricedRows

    @property
    def merit(self) -> tuple[float, float]:
        return merit(self.found)


def steep_draft(problem: Problem, effort: float) -> Draft | None:
    """Search from the steep seeds; None if there are none that fit in memory."""
    is_compiled = compiled() is not None
    passes = 3 * problem.num_stages * problem.num_microbatches
    per_pass = _BUDGET_PER_PASS[is_compiled] * min(1.0, _FULL_BUDGET_RANKS / problem.num_ranks)
    share = problem.share_of_a_vee if problem.num_ranks > _MANY_RANKS else 1.0
    budget = effort * (_BUDGET[is_compiled] + per_pass * share * passes)
    small = problem.miniature(_MINIATURE_RANKS)
    workbench = Workbench(small, budget, ends=small is problem)
    ways = dict.fromkeys(product(steep(problem), _HASTES), _EAGERNESSES[0])
    pool = list(_tried(workbench, ways, _TRIED * budget))
    if workbench.problem is not problem:
        pool += [tuned(workbench, filled, *_MANY) for filled in _distinct(pool, _CHOSEN)]
        worst_first = sorted(pool, key=lambda filled: filled.merit, reverse=True)
        ways = {(filled.seed, filled.haste): filled.way for filled in worst_first}
        workbench = Workbench(problem, workbench.left, ends=True)
        pool = list(_tried(workbench, dict(reversed(ways.items())), _TRIED * budget))
    for number in count():
        left = workbench.left
        pool = _distinct(pool, _CHOSEN)  # the others are never chosen, and to sort them takes longer than the search
        for filled in pool[: max(1, _CHOSEN >> number)]:
            if workbench.left > _TUNED * budget:
                better = tuned(workbench, filled, *_MANY, seed=number)
                pool += [better, *_tightened(workbench, better, _TUNED * budget)]
        if not _TUNED * budget < workbench.left < left:
            break
    return Draft(workbench, [filled.found for filled in pool]) if pool else None


def effort_besides(problem: Problem) -> float:
    """Return the share of its budget that the search from all seeds needs besides ``steep_draft``."""
    is_large = problem.num_microbatches > problem.num_ranks > _MANY_RANKS
    return _REST if is_large and any(True for _ in steep(problem)) else 1.0


def _tried(workbench: Workbench, ways: Mapping[tuple[Seed, float], Eagerness], floor: float) -> Iterator[FilledRows]:
    """Yield rows of the seeds, filled first in the given way, until the budget is down to ``floor``."""
    for (seed, haste), way in ways.items():
        if workbench.left < floor:
            return
        # Only what was compacted forward last: backward, it leaves its waits where no W is ready yet.
        for found in list(workbench.derive(Derivation(seed, haste, None, _STEPS)))[1::2]:
            yield tuned(workbench, FilledRows(seed, haste, way, found), *_FEW)


def tuned(workbench: Workbench, filled: FilledRows, halvings: int, tries: int, seed: int = 0) -> FilledRows:
    """Return ``filled`` with its W passes in the best places; ``filled`` itself if none are better.

    A few ways to fill gaps are tried without a target, and for the middle between the targets missed and the best cost,
    again and again; then as many random changes of the best way as ``tries``.
    """
    best, way, target = filled.found, filled.way, INFEASIBLE
    work = max(workbench.problem.work)
    for eagerness in dict.fromkeys((filled.way, *_EAGERNESSES)):
        missed, reached, aim = work, INFEASIBLE, INFEASIBLE
        for _ in range(1 + halvings):
            other = workbench.filled(filled.found, eagerness, aim)
            if other is None:
                break
            if merit(other) < merit(best):
                best, way, target = other, eagerness, aim
            reached = min(reached, other.cost)
            missed = aim if missed < aim < other.cost else missed
            aim = (missed + reached) / 2
    dice = Dice(seed)
    for number in range(tries):
        step = _STEP * (1 - number / tries)
        eagerness = Eagerness(*(_changed(share, step, dice) for share in way))
        aim, fate = target, dice.uniform()
        if fate < _RETARGETED:
            aim = work + dice.uniform() * (best.cost - work)
        elif fate < 2 * _RETARGETED:
            aim = INFEASIBLE
        other = workbench.filled(filled.found, eagerness, aim)
        if other is not None and merit(other) < merit(best):
            best, way, target = other, eagerness, aim
    return filled._replace(way=way, found=best)


def _changed(share: float, step: float, dice: Dice) -> float:
    if dice.uniform() >= _CHANGED:
        return share
    return max(0.0, share + step * (2 * dice.uniform() - 1))


def _tightened(workbench: Workbench, filled: FilledRows, floor: float) -> list[FilledRows]:
    """Compact ``filled`` and tune the result, again and again, until this no longer helps or the budget is down to
    ``floor``.
    """
    steps: list[FilledRows] = []
    while workbench.left > floor:
        dense = [tuned(workbench, filled._replace(found=found), *_TIGHT) for found in workbench.dense(filled.found)]
        better = min(dense, default=filled, key=lambda one: one.merit)
        if better.found.cost >= filled.found.cost:
            break
        steps.append(better)
        filled = better
    return steps


def _distinct(pool: Sequence[FilledRows], count: int) -> list[FilledRows]:
    of = {id(filled.found): filled for filled in pool}
    return [of[id(found)] for found in distinct([filled.found for filled in pool], count)]

"""The search of one placement: start from many patterns, densify the promising ones, polish the best, repeat the middle.

Everything is counted in passes placed, so that the result does not depend on how fast the machine is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron.zero_bubble.search.compact import compact
from megatron.zero_bubble.search.decode import INFEASIBLE, decode
from megatron.zero_bubble.search.improve import improve
from megatron.zero_bubble.search.problem import Problem, Rows, mirrored
from megatron.zero_bubble.search.seeds import seeds
from megatron.zero_bubble.search.stretch import stretch

_BUDGET = 1_500_000
_SCREENING, _COMPACTING = 0.15, 0.6
"""Parts of the budget after which screening and compacting stop."""
_COMPACT_COST = 6
"""How much longer it takes to place a pass in ``compact`` than in ``decode``."""
_EAGERNESS = (0.6, 1.0, 0.3)
_PROMISING = 6
_ROUNDS = 3
_AMBITIONS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""By which parts of its idle time a schedule is asked to become shorter."""
_PERIODS = (1, 2, 3, 4)
_EPSILON = 1e-6


class Found(NamedTuple):
    """Rows of F and B, how their W's were filled in, and what came out; the least is the best."""

    cost: float
    mean: float
    eagerness: float
    target: float
    rows: Rows


class Budget:
    """Passes that may still be placed."""

    def __init__(self, passes: float) -> None:
        self.total = self.left = passes

    def spent(self, part: float) -> bool:
        """Whether more than ``part`` of the total is gone."""
        return self.total - self.left >= part * self.total


def search(problem: Problem, effort: float) -> tuple[float, Rows]:
    """The cost and the rows (with W's) of the best schedule found on one placement."""
    return _Search(problem, Budget(effort * _BUDGET)).run()


class _Search:
    def __init__(self, problem: Problem, budget: Budget) -> None:
        self.whole = problem
        few = 2 * problem.num_ranks + 8
        short = problem.num_microbatches <= 1.25 * few
        self.problem = problem if short else replace(problem, num_microbatches=few)
        self.budget = budget

    def run(self) -> tuple[float, Rows]:
        pool = self._screen(seeds(self.problem))
        for found in distinct(pool, _PROMISING):
            pool += self._densify(found)
            if self.budget.spent(_COMPACTING):
                break
        best = [self._retarget(found) for found in distinct(pool, 3)]
        best += [self._polish(found) for found in distinct(best, 2)]
        if self.problem is not self.whole:
            best = self._stretch(distinct(best, 2))
        found = min(best, key=_merit)
        return found.cost, decode(self.whole, found.rows, found.eagerness, found.target).rows

    def _try(self, rows: Rows, eagerness: float, target: float = INFEASIBLE) -> Found:
        self.budget.left -= 3 * self.problem.num_stages * self.problem.num_microbatches
        cost, mean, _ = decode(self.problem, rows, eagerness, target)
        return Found(cost, mean, eagerness, target, rows)

    def _screen(self, starts: Iterable[Rows]) -> list[Found]:
        pool = []
        for count, rows in enumerate(starts):
            pool += [self._try(rows, eagerness) for eagerness in (_EAGERNESS if count < 2 else _EAGERNESS[:1])]
            if self.budget.spent(_SCREENING):
                break
        return [found for found in pool if found.cost < INFEASIBLE]

    def _densify(self, found: Found) -> Iterator[Found]:
        """Forward and backward improvement in turn, from either side, under several limits on forwards ahead."""
        for most_held in self._limits_ahead():
            for first in (False, True):
                rows, backwards = found.rows, first
                for _ in range(_ROUNDS):
                    self.budget.left -= _COMPACT_COST * 3 * self.problem.num_stages * self.problem.num_microbatches
                    denser = self._compact(rows, most_held, backwards)
                    backwards = not backwards
                    if denser is None:
                        continue
                    rows = denser
                    yield min((self._retargeted_once(rows, eagerness) for eagerness in _EAGERNESS), key=_merit)

    def _compact(self, rows: Rows, most_held: list[int] | None, backwards: bool) -> Rows | None:
        if not backwards:
            return compact(self.problem, rows, most_held)
        denser = compact(self.problem.mirrored, mirrored(rows), most_held)
        return denser and mirrored(denser)

    def _limits_ahead(self) -> Iterator[list[int] | None]:
        """None, and for a V a share of memory kept free for the way up."""
        yield None
        problem, p = self.problem, self.problem.num_ranks
        if problem.num_stages == p:
            return
        for half in (True, False):
            limits = [0] * (2 * p)
            for rank in range(p):
                up = 2 * p - 1 - rank
                room = int(problem.limit[rank] / max(problem.kept[rank], problem.kept[up]))
                limits[up] = min(rank + 1, room // 2 if half else room - 1)
                limits[rank] = room - limits[up]
            yield limits

    def _retargeted_once(self, rows: Rows, eagerness: float) -> Found:
        found = self._try(rows, eagerness)
        if found.cost == INFEASIBLE:
            return found
        return min(found, self._try(rows, eagerness, found.cost - _EPSILON), key=_merit)

    def _retarget(self, found: Found) -> Found:
        """Ask for shorter schedules: ranks then spend less of their idle time before W's plug the gaps."""
        best, work = found, max(self.problem.work)
        for ambition in _AMBITIONS:
            target = best.cost - ambition * (best.cost - work) - _EPSILON
            best = min([best, *(self._try(found.rows, eagerness, target) for eagerness in _EAGERNESS[:2])], key=_merit)
        return best

    def _polish(self, found: Found) -> Found:
        """Local search with what is left of the budget, half of it each time."""
        passes = 3 * self.problem.num_stages * self.problem.num_microbatches
        tries = int(self.budget.left / 2 / passes)
        heat = 0.1 * max(self.problem.work) / self.problem.num_microbatches
        for degrees in (0.0, heat):
            if tries > 2:
                cost, rows = improve(self.problem, found.rows, found.eagerness, tries // 2, degrees, found.target)
                if cost < found.cost:
                    found = found._replace(cost=cost, rows=rows)
        self.budget.left -= tries * passes
        return found

    def _stretch(self, pool: list[Found]) -> list[Found]:
        short, self.problem = self.problem, self.whole
        added = self.whole.num_microbatches - short.num_microbatches
        result = []
        for found in pool:
            full = decode(short, found.rows, found.eagerness, found.target).rows
            target = found.target + added * max(short.work) / short.num_microbatches
            for period in _PERIODS:
                rows = stretch(short, full, self.whole.num_microbatches, period)
                result.append(self._try(rows, found.eagerness, target))
        return [self._retarget(min(result, key=_merit))]


def distinct(pool: Iterable[Found], count: int) -> list[Found]:
    """The best ``count`` with different costs."""
    chosen: dict[tuple[float, float], Found] = {}
    for found in sorted(pool, key=_merit):
        chosen.setdefault((round(found.cost, 6), round(found.mean, 6)), found)
    return list(chosen.values())[:count]


def _merit(found: Found) -> tuple[float, float]:
    return found.cost, found.mean

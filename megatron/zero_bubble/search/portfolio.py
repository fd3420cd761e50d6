"""The search of one placement: start from many patterns, densify the promising, polish the best, repeat the middle.

Everything is counted in passes placed, so that the result does not depend on how fast the machine is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron.zero_bubble.search.compact import compact
from megatron.zero_bubble.search.decode import INFEASIBLE, decode
from megatron.zero_bubble.search.improve import Improved, improve
from megatron.zero_bubble.search.problem import Problem, Rows, mirrored
from megatron.zero_bubble.search.seeds import seeds
from megatron.zero_bubble.search.stretch import stretch

_BUDGET = 2_000_000
_SCREENING, _COMPACTING = 0.1, 0.6
"""Parts of the budget after which screening and compacting stop."""
_COMPACT_COST = 3.5
"""How much longer it takes to place a pass in ``compact`` than in ``decode``."""
_EAGERNESS = (0.6, 1.0, 0.3)
_NEAR = 1.03
"""Rows whose cost is within this factor of the best deserve more attempts at filling in their W's."""
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
        pool = self._densify(self._screen(seeds(self.problem)))
        best = [self._retarget(found) for found in distinct(pool, 3)]
        best += [self._polish(found) for found in distinct(best, 2)]
        if self.problem is not self.whole:
            best = self._stretch(distinct(best, 2))
        found = min(best, key=_merit)
        return found.cost, decode(self.whole, found.rows, found.eagerness, found.target).rows

    @property
    def passes(self) -> int:
        return 3 * self.problem.num_stages * self.problem.num_microbatches

    def _try(self, rows: Rows, eagerness: float, target: float = INFEASIBLE) -> Found:
        self.budget.left -= self.passes
        cost, mean, _ = decode(self.problem, rows, eagerness, target)
        return Found(cost, mean, eagerness, target, rows)

    def _screen(self, starts: Iterable[Rows]) -> list[Found]:
        pool = []
        for count, rows in enumerate(starts):
            pool += [self._try(rows, eagerness) for eagerness in (_EAGERNESS if count < 2 else _EAGERNESS[:1])]
            if self.budget.spent(_SCREENING):
                break
        return [found for found in pool if found.cost < INFEASIBLE]

    def _densify(self, starts: list[Found]) -> list[Found]:
        """Forward and backward improvement in turn: of the best rows so far, and of a start not yet tried, in turn."""
        pool = distinct(starts, len(starts))
        fresh: list[tuple[Found, tuple[bool, ...]]] = [(found, (False, True)) for found in pool]
        grown: list[tuple[Found, tuple[bool, ...]]] = []
        while (fresh or grown) and not self.budget.spent(_COMPACTING):
            queue = grown if grown and (not fresh or len(fresh) % 2) else fresh
            found, directions = queue.pop(0)
            for backwards in directions:
                for most_held in self._limits_ahead():
                    rows = self._compact(found.rows, most_held, backwards)
                    better = rows and self._appraise(rows, min(pool[0].cost, found.cost))
                    if better and better.cost < INFEASIBLE and all(better[:2] != other[:2] for other in pool):
                        pool.append(better)
                        grown.append((better, (not backwards,)))
            pool.sort(key=_merit)
            grown.sort(key=lambda entry: _merit(entry[0]))
        return pool

    def _appraise(self, rows: Rows, best: float) -> Found:
        """Decode in the ways that may pay: all of them only where the first comes near the best."""
        found = self._try(rows, _EAGERNESS[0])
        if found.cost > _NEAR * best:
            return found
        found = min(found, *(self._try(rows, eagerness) for eagerness in _EAGERNESS[1:]), key=_merit)
        return min(found, self._try(rows, found.eagerness, found.cost - _EPSILON), key=_merit)

    def _compact(self, rows: Rows, most_held: list[int] | None, backwards: bool) -> Rows | None:
        self.budget.left -= _COMPACT_COST * self.passes
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

    def _retarget(self, found: Found) -> Found:
        """Ask for shorter schedules: ranks then spend less of their idle time before W's plug the gaps."""
        best, work = found, max(self.problem.work)
        for ambition in _AMBITIONS:
            target = best.cost - ambition * (best.cost - work) - _EPSILON
            best = min([best, *(self._try(found.rows, eagerness, target) for eagerness in _EAGERNESS[:2])], key=_merit)
        return best

    def _polish(self, found: Found) -> Found:
        """Local search with what is left of the budget, half of it each time."""
        tries = int(self.budget.left / 2 / self.passes)
        heat = 0.1 * max(self.problem.work) / self.problem.num_microbatches
        for degrees in (0.0, heat):
            if tries > 2:
                start = Improved(found.cost, found.target, found.rows)
                better = improve(self.problem, start, found.eagerness, tries // 2, degrees)
                found = found._replace(**better._asdict())
        self.budget.left -= tries * self.passes
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

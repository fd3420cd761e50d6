"""The search of one placement: start from many patterns, densify the promising, polish the best, repeat the middle.

Everything is counted in passes placed, so that the result does not depend on how fast the machine is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from megatron.zero_bubble.search.decode import INFEASIBLE
from megatron.zero_bubble.search.improve import Improved
from megatron.zero_bubble.search.loops import Packed, library, loops
from megatron.zero_bubble.search.problem import Problem, Rows
from megatron.zero_bubble.search.seeds import fitted, handcrafted, seeds, serial
from megatron.zero_bubble.search.stretch import stretch

_BUDGET, _COMPILED_BUDGET = 2_000_000, 40_000_000
_SCREENING, _COMPACTING, _SHORT = 0.1, 0.6, 0.5
"""Parts of the budget after which screening and compacting stop, and the part for a search on fewer microbatches."""
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
    rows: Packed


class Budget:
    """Passes that may still be placed."""

    def __init__(self, passes: float) -> None:
        self.total = self.left = passes

    def spent(self, part: float) -> bool:
        """Whether more than ``part`` of the total is gone."""
        return self.total - self.left >= part * self.total


def search(problem: Problem, effort: float) -> tuple[float, Rows]:
    """The cost and the rows (with W's) of the best schedule found on one placement."""
    passes = effort * (_BUDGET if library() is None else _COMPILED_BUDGET)
    few = 2 * problem.num_ranks + 8
    if problem.num_microbatches <= 1.25 * few:
        return _Search(problem, passes).whole(seeds(problem))
    short = _Search(replace(problem, num_microbatches=few), _SHORT * passes)
    stretched = (rows for found in short.best(seeds(short.problem)) for rows in _stretched(problem, short, found))
    return _Search(problem, (1 - _SHORT) * passes).whole(chain([serial(problem)], stretched, handcrafted(problem)))


def _stretched(problem: Problem, short: _Search, found: Found) -> Iterator[Rows]:
    """Rows for all microbatches of ``problem`` from those found for few."""
    full = short.loops.full(found.rows, found.eagerness, found.target)
    for period in _PERIODS:
        yield fitted(problem, stretch(short.problem, full, problem.num_microbatches, period))


class _Search:
    def __init__(self, problem: Problem, passes: float) -> None:
        self.problem = problem
        self.budget = Budget(passes)
        self.loops = loops(problem)

    def whole(self, starts: Iterable[Rows]) -> tuple[float, Rows]:
        """The cost of the best found from ``starts``, and its rows with W's."""
        found = self.best(starts)[0]
        return found.cost, self.loops.full(found.rows, found.eagerness, found.target)

    def best(self, starts: Iterable[Rows]) -> list[Found]:
        """The best two found from ``starts``, the better one first."""
        pool = self._densify(self._screen(starts))
        best = [self._retarget(found) for found in distinct(pool, 3)]
        best += [self._polish(found) for found in distinct(best, 2)]
        return distinct(best, 2)

    @property
    def passes(self) -> int:
        return 3 * self.problem.num_stages * self.problem.num_microbatches

    def _try(self, rows: Packed, eagerness: float, target: float = INFEASIBLE) -> Found:
        self.budget.left -= self.passes
        cost, mean = self.loops.decode(rows, eagerness, target)
        return Found(cost, mean, eagerness, target, rows)

    def _screen(self, starts: Iterable[Rows]) -> list[Found]:
        pool = []
        for count, rows in enumerate(map(self.loops.pack, starts)):
            pool += [self._try(rows, eagerness) for eagerness in (_EAGERNESS if count < 2 else _EAGERNESS[:1])]
            if self.budget.spent(_SCREENING):
                break
        return [found for found in pool if found.cost < INFEASIBLE]

    def _densify(self, starts: list[Found]) -> list[Found]:
        """Forward and backward improvement in turn: of the best rows so far, and of a start not yet tried, in turn."""
        pool = distinct(starts, len(starts))
        known = {found[:2] for found in pool}
        fresh: list[tuple[Found, tuple[bool, ...]]] = [(found, (False, True)) for found in pool]
        grown: list[tuple[Found, tuple[bool, ...]]] = []
        while (fresh or grown) and not self.budget.spent(_COMPACTING):
            queue = grown if grown and (not fresh or len(fresh) % 2) else fresh
            found, directions = queue.pop(0)
            for backwards in directions:
                for most_held in self._limits_ahead():
                    rows = self._compact(found.rows, most_held, backwards)
                    better = rows and self._appraise(rows, min(pool[0].cost, found.cost))
                    if better and better.cost < INFEASIBLE and better[:2] not in known:
                        known.add(better[:2])
                        pool.append(better)
                        grown.append((better, (not backwards,)))
            pool.sort(key=_merit)
            grown.sort(key=lambda entry: _merit(entry[0]))
        return pool

    def _appraise(self, rows: Packed, best: float) -> Found:
        """Decode in the ways that may pay: all of them only where the first comes near the best."""
        found = self._try(rows, _EAGERNESS[0])
        if found.cost > _NEAR * best:
            return found
        found = min(found, *(self._try(rows, eagerness) for eagerness in _EAGERNESS[1:]), key=_merit)
        return min(found, self._try(rows, found.eagerness, found.cost - _EPSILON), key=_merit)

    def _compact(self, rows: Packed, most_held: list[int] | None, backwards: bool) -> Packed | None:
        self.budget.left -= _COMPACT_COST * self.passes
        return self.loops.compact(rows, most_held, 0.0, backwards)

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
                better = self.loops.improve(start, found.eagerness, tries // 2, degrees)
                found = found._replace(**better._asdict())
        self.budget.left -= tries * self.passes
        return found


def distinct(pool: Iterable[Found], count: int) -> list[Found]:
    """The best ``count`` with different costs."""
    chosen: dict[tuple[float, float], Found] = {}
    for found in sorted(pool, key=_merit):
        chosen.setdefault((round(found.cost, 6), round(found.mean, 6)), found)
    return list(chosen.values())[:count]


def _merit(found: Found) -> tuple[float, float]:
    return found.cost, found.mean

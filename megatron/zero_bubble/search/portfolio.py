"""The search of one placement: many patterns made dense, the best of them polished.

1. Screen: every seed is compacted forward and backward once; on few microbatches when there are many, because a steady
   state that is long enough shows all there is to see.
2. Vary: the most promising seeds are compacted in several ways.
3. Cook the best recipes (a seed and the way it was compacted) again, for all microbatches.
4. Refill: place the W's of the best anew, asking for shorter and shorter schedules.
5. Polish: local search, compaction, local search again.

Everything is counted in passes placed, so that the result does not depend on how fast the machine is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron.zero_bubble.search.evaluate import INFEASIBLE
from megatron.zero_bubble.search.loops import Packed, library, loops
from megatron.zero_bubble.search.problem import Problem, Rows
from megatron.zero_bubble.search.seeds import Seed, seeds, serial

_BUDGET, _COMPILED_BUDGET = 1_500_000, 60_000_000
_SCREENING, _VARYING = 0.3, 0.6
"""Parts of the budget after which screening and varying stop."""
_COMPACTING = 10
"""How much longer it takes to place a pass in ``compact`` than in ``evaluate``."""
_HASTES = (0.0, 0.3, 0.6)
_STEPS = 4
"""How often compaction changes its direction."""
_COOKED, _REFILLED, _POLISHED = 16, 32, 6
"""How many recipes are cooked for all microbatches, and how many results are refilled and polished."""
_EAGERNESS = (0.6, 1.0, 0.3)
_AMBITIONS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""By which parts of its idle time a schedule is asked to become shorter when its W's are placed anew."""
_HEAT = 0.1
"""Of local search, in parts of a microbatch's work."""


class Recipe(NamedTuple):
    """How rows came to be: ``steps`` compactions of a seed, the first one forward, then in turn."""

    seed: Seed
    haste: float
    most_held: tuple[int, ...] | None
    steps: int


class Found(NamedTuple):
    """Rows and what they cost; the least is the best."""

    cost: float
    mean: float
    rows: Packed
    recipe: Recipe | None = None


class Kitchen:
    """Rows for one problem, paid from a budget.

    Attributes:
        budget: passes that may still be placed.
    """

    def __init__(self, problem: Problem, budget: float) -> None:
        self.problem, self.budget = problem, budget
        self._loops = loops(problem)
        self._passes = 3 * problem.num_stages * problem.num_microbatches

    def unpack(self, found: Found) -> Rows:
        return self._loops.unpack(found.rows)

    def cook(self, seed: Seed, haste: float, most_held: tuple[int, ...] | None, steps: int) -> Iterator[Found]:
        """The seed itself and what comes of it after every step, as far as these are feasible."""
        rows = self._loops.pack(seed(self.problem))
        for step in range(steps + 1):
            if step:
                rows = self._compacted(rows, None if step % 2 == 0 else most_held, haste, step % 2 == 0)
                if rows is None:
                    return
            found = self._priced(rows, Recipe(seed, haste, most_held, step))
            if found.cost < INFEASIBLE:
                yield found

    def cook_again(self, recipe: Recipe) -> Iterator[Found]:
        """What another problem's recipe makes of this one."""
        return self.cook(*recipe)

    def dense(self, found: Found) -> Iterator[Found]:
        """``found`` compacted, in either direction."""
        for backwards in (True, False):
            rows = self._compacted(found.rows, None, 0.0, backwards)
            if rows is not None:
                yield self._priced(rows)

    def refilled(self, found: Found) -> Iterator[Found]:
        """``found`` with its W's in other places."""
        work = max(self.problem.work)
        for eagerness in _EAGERNESS:
            best = INFEASIBLE
            for ambition in (0.0, *_AMBITIONS):
                target = best - ambition * (best - work) if best < INFEASIBLE else INFEASIBLE
                self.budget -= 2 * self._passes
                rows = self._loops.refill(found.rows, eagerness, target)
                if rows is not None:
                    other = self._priced(rows, found.recipe)
                    best = min(best, other.cost)
                    yield other

    def refined(self, found: Found, passes: float, heat: float, seed: int) -> Found:
        """``found`` after local search that places at most ``passes``."""
        tries = int(min(passes, self.budget) / self._passes)
        if tries < 2:
            return found
        self.budget -= tries * self._passes
        return self._priced(self._loops.refine(found.rows, tries, heat, seed)[1])

    def _compacted(
        self, rows: Packed, most_held: tuple[int, ...] | None, haste: float, backwards: bool
    ) -> Packed | None:
        self.budget -= _COMPACTING * self._passes
        return self._loops.compact(rows, list(most_held) if most_held else None, haste, backwards)

    def _priced(self, rows: Packed, recipe: Recipe | None = None) -> Found:
        self.budget -= self._passes
        return Found(*self._loops.evaluate(rows), rows, recipe)


def search(problem: Problem, effort: float) -> tuple[float, Rows]:
    """The cost and the rows of the best schedule found on one placement."""
    budget = effort * (_BUDGET if library() is None else _COMPILED_BUDGET)
    few = 2 * problem.num_ranks + 8
    short = problem.num_microbatches > 1.25 * few
    kitchen = Kitchen(replace(problem, num_microbatches=few) if short else problem, budget)
    pool = list(_varied(kitchen, list(_screened(kitchen))))
    if short:
        kitchen = Kitchen(problem, kitchen.budget)
        pool = [found for recipe in _recipes(pool) for found in kitchen.cook_again(recipe)]
    pool += [other for found in distinct(pool, _REFILLED) for other in kitchen.refilled(found)]
    best = min(_polished(kitchen, distinct(pool, _POLISHED)), key=_merit)
    return best.cost, kitchen.unpack(best)


def _screened(kitchen: Kitchen) -> Iterator[Found]:
    """Every seed, as far as the budget goes."""
    floor = (1 - _SCREENING) * kitchen.budget
    for count, seed in enumerate(seeds(kitchen.problem)):
        yield from kitchen.cook(seed, 0.0, None, 2)
        if kitchen.budget < floor and count:
            return


def _varied(kitchen: Kitchen, pool: list[Found]) -> Iterator[Found]:
    """The pool, and more of its best seeds."""
    yield from pool
    floor = kitchen.budget * (1 - _VARYING) / (1 - _SCREENING)
    promising = dict.fromkeys(found.recipe.seed for found in sorted(pool, key=_merit) if found.recipe)
    for seed in promising:
        for haste in _HASTES:
            for most_held in _shares(kitchen.problem):
                if haste or most_held:
                    yield from kitchen.cook(seed, haste, most_held, _STEPS)
                if kitchen.budget < floor:
                    return


def _shares(problem: Problem) -> Iterator[tuple[int, ...] | None]:
    """No limit on what each stage keeps; and for a V two ways to keep a share of memory free for the way up."""
    yield None
    p = problem.num_ranks
    if problem.num_stages == p:
        return
    for half in (True, False):
        most = [0] * (2 * p)
        for rank in range(p):
            up = 2 * p - 1 - rank
            room = int(problem.limit[rank] / max(problem.kept[rank], problem.kept[up]))
            most[up] = min(rank + 1, room // 2 if half else room - 1)
            most[rank] = room - most[up]
        yield tuple(most)


def _recipes(pool: Iterable[Found]) -> Iterable[Recipe]:
    """The best, and the one that always works."""
    ordered = sorted(pool, key=_merit)
    chosen = dict.fromkeys(found.recipe for found in distinct(ordered, _COOKED) if found.recipe)
    safe = next(found.recipe for found in ordered if found.recipe and found.recipe.seed is serial)
    return [*chosen, safe]


def _polished(kitchen: Kitchen, pool: list[Found]) -> Iterator[Found]:
    """The pool, and what local search and compaction in turn make of it, on the rest of the budget."""
    yield from pool
    heat = _HEAT * max(kitchen.problem.work) / kitchen.problem.num_microbatches
    for round_, (count, warmth) in enumerate(((_POLISHED, 0.0), (_POLISHED // 2, heat), (2, heat), (1, heat))):
        left = kitchen.budget * (0.3, 0.4, 0.5, 1.0)[round_]
        chosen = distinct(pool, count)
        for found in chosen:
            better = kitchen.refined(found, left / len(chosen), warmth, round_)
            pool += [better, *kitchen.dense(better)]
        yield min(pool, key=_merit)


def distinct(pool: Iterable[Found], count: int) -> list[Found]:
    """The best ``count`` with different costs."""
    chosen: dict[tuple[float, float], Found] = {}
    for found in sorted(pool, key=_merit):
        chosen.setdefault((round(found.cost, 6), round(found.mean, 6)), found)
        if len(chosen) == count:
            break
    return list(chosen.values())


def _merit(found: Found) -> tuple[float, float]:
    return found.cost, found.mean

"""The search of one placement: many patterns made dense, the best of them polished.

1. Screen: every seed is compacted forward and backward once; on a miniature, with fewer ranks and microbatches, where
   the problem is large: what a pattern is worth hardly depends on its size.
2. Vary: the most promising seeds are compacted in several ways.
3. Derive: if that was a miniature, the best derivations (a seed and the way it was compacted) are repeated on the whole
   problem.
4. Refill: place the W's of the best anew, asking for shorter and shorter schedules.
5. Polish: local search, compaction, local search again.

Everything is counted in passes placed, so that the result does not depend on how fast the machine is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megatron.zero_bubble.search.evaluate import INFEASIBLE
from megatron.zero_bubble.search.loops import Packed, compiled, loops
from megatron.zero_bubble.search.problem import Problem, Rows
from megatron.zero_bubble.search.seeds import Seed, classics, seeds, serial

_BUDGET, _BUDGET_A_PASS = (1_500_000, 60_000_000), (20, 300)
"""The budget in passes placed, without and with the compiled loops: one part, and one for the problem's size."""
_MOST_RANKS, _BUDGET_ABOVE = 16, (0.6, 0.4)
"""Above this many ranks a miniature has fewer of them, and this part of the budget does: for one stage a rank, for two,
whose plans also take twice as long to lower.
"""
_SCREENED, _VARIED, _RANKED, _DERIVED, _REFILLED, _SETTLED = 0.42, 0.48, 0.56, 0.66, 0.84, 0.92
"""Parts of the budget after which each of these stops; what is left is for polishing."""
_COMPACTING = 8
"""How much longer it takes to place a pass in ``compact`` than in ``evaluate``."""
_HASTES = (0.0, 0.3, 0.6)
_SHARES = (None, 0.5, 1.0)
"""How much of a V's memory may be taken on the way down: all, a half, all but what one microbatch needs on its way up.
None: first come, first served."""
_STEPS = 4
"""How often compaction changes its direction."""
_MOST_REFILLED, _MOST_POLISHED = 64, 6
_EAGERNESS = (0.6, 1.0, 0.3)
_AMBITIONS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""By which parts of its idle time a schedule is asked to become shorter when its W's are placed anew; mostly, only some
of both are tried.
"""
_EPSILON = 1e-6
_HEAT = 0.1
"""Of local search, in parts of a microbatch's work."""


class Derivation(NamedTuple):
    """How rows came to be: ``steps`` compactions of a seed, the first one forward, then in turn."""

    seed: Seed
    haste: float
    share: float | None
    steps: int


class Found(NamedTuple):
    """Rows and what they cost; the least is the best."""

    cost: float
    mean: float
    rows: Packed
    derivation: Derivation | None = None


class Workbench:
    """Rows for one problem, paid from a budget of passes placed."""

    def __init__(self, problem: Problem, budget: float) -> None:
        self.problem, self.left = problem, budget
        self._loops = loops(problem)
        self._passes = 3 * problem.num_stages * problem.num_microbatches
        self._raw: dict[Seed, Packed] = {}

    def given(self, rows: Rows) -> Found:
        """Rows of whatever origin."""
        return self._priced(self._loops.pack(rows))

    def unpack(self, found: Found) -> Rows:
        return self._loops.unpack(found.rows)

    def derive(self, derivation: Derivation) -> Iterator[Found]:
        """The seed itself and what comes of it after every step, as far as these are feasible."""
        seed, haste, share, steps = derivation
        if seed not in self._raw:
            self._raw[seed] = self._loops.pack(seed(self.problem))
        rows, most_held = self._raw[seed], None if share is None else _most_held(self.problem, share)
        for step in range(steps + 1):
            if step:
                backwards = step % 2 == 0
                rows = self._compacted(rows, None if backwards else most_held, haste, backwards)
                if rows is None:
                    return
            found = self._priced(rows, Derivation(seed, haste, share, step))
            if found.cost < INFEASIBLE:
                yield found

    def dense(self, found: Found) -> Iterator[Found]:
        """``found`` compacted, in either direction."""
        for backwards in (True, False):
            rows = self._compacted(found.rows, None, 0.0, backwards)
            if rows is not None:
                yield self._priced(rows)

    def refilled(self, found: Found, thorough: bool) -> Iterator[Found]:
        """``found`` with its W's in other places."""
        work = max(self.problem.work)
        for eagerness in _EAGERNESS if thorough else _EAGERNESS[:2]:
            best = INFEASIBLE
            for ambition in _AMBITIONS if thorough else _AMBITIONS[::3]:
                target = best - ambition * (best - work) if best < INFEASIBLE else INFEASIBLE
                self.left -= 2 * self._passes
                rows = self._loops.refill(found.rows, eagerness, target)
                if rows is not None:
                    other = self._priced(rows)
                    best = min(best, other.cost)
                    yield other

    def loosened(self, found: Found) -> Iterator[Found]:
        """``found`` compacted and refilled: once W's have moved, there is room for F's and B's, and again for W's."""
        for denser in self.dense(found):
            yield from self.refilled(denser, thorough=False)

    def settled(self, found: Found, floor: float) -> Iterator[Found]:
        """``found`` loosened until that helps no more, or the budget is down to ``floor``; then refilled thoroughly."""
        while self.left > floor:
            better = min(self.loosened(found), default=found, key=_merit)
            if better.cost >= found.cost - _EPSILON:
                yield from self.refilled(found, thorough=True)
                return
            yield better
            found = better

    def refined(self, found: Found, passes: float, heat: float, seed: int) -> Found:
        """``found`` after local search that places at most ``passes``."""
        tries = int(min(passes, self.left) / self._passes)
        if tries < 2:
            return found
        self.left -= tries * self._passes
        return self._priced(self._loops.refine(found.rows, tries, heat, seed)[1])

    def _compacted(self, rows: Packed, most_held: list[int] | None, haste: float, backwards: bool) -> Packed | None:
        self.left -= _COMPACTING * self._passes
        return self._loops.compact(rows, most_held, haste, backwards)

    def _priced(self, rows: Packed, derivation: Derivation | None = None) -> Found:
        self.left -= self._passes
        return Found(*self._loops.evaluate(rows), rows, derivation)


class Draft:
    """The best rows found for one placement before they are polished.

    Args:
        known: rows to start from beside the seeds; what is found is no worse.

    Attributes:
        problem: what they are for.
        cost: of the best.
    """

    def __init__(self, problem: Problem, effort: float, known: Iterable[Rows] = ()) -> None:
        self.problem = problem
        is_compiled = compiled() is not None
        passes = 3 * problem.num_stages * problem.num_microbatches
        part = 1.0 if problem.num_ranks <= _MOST_RANKS else _BUDGET_ABOVE[problem.num_stages > problem.num_ranks]
        budget = effort * (_BUDGET[is_compiled] * part + _BUDGET_A_PASS[is_compiled] * passes)
        small = _miniature(problem, _SCREENED * budget)
        workbench = Workbench(small, budget)
        pool = list(_varied(workbench, (1 - _VARIED) * budget, list(_screened(workbench, (1 - _SCREENED) * budget))))
        if small is not problem:
            derivations = _ranked(workbench, (1 - _RANKED) * budget, pool)
            workbench = Workbench(problem, workbench.left)
            pool = list(_derived(workbench, (1 - _DERIVED) * budget, derivations))
        else:
            pool = distinct(pool, _MOST_REFILLED)
        # One microbatch at a time, compacted: what a greedy list schedule would do, once its W's fill the gaps.
        greedy = [found for haste in _HASTES for found in workbench.derive(Derivation(serial, haste, None, 2))]
        classic = list(_classic(workbench))
        given = [found for rows in known if (found := workbench.given(rows)).cost < INFEASIBLE]
        best, candidates = [*given], [*distinct(classic, 3), *pool[:2], *distinct(greedy, 2), *pool[2:]]
        pool += [*given, *classic, *greedy]
        for found in candidates:
            if workbench.left < (1 - _REFILLED) * budget:
                break
            if filled := list(workbench.refilled(found, thorough=False)):
                filled += workbench.loosened(min(filled, key=_merit))
                pool += filled
                best.append(min(filled, key=_merit))
        for found in distinct(best, _MOST_POLISHED):
            pool += workbench.settled(found, (1 - _SETTLED) * budget)
        self._workbench, self._pool = workbench, distinct(pool, _MOST_POLISHED)
        self.cost = self._pool[0].cost

    def polish(self) -> Rows:
        """The best rows after local search and compaction in turn, on the rest of the budget."""
        pool, workbench = self._pool, self._workbench
        heat = _HEAT * max(self.problem.work) / self.problem.num_microbatches
        rounds = ((_MOST_POLISHED, 0.0, 0.3), (_MOST_POLISHED // 2, heat, 0.4), (2, heat, 0.5), (1, heat, 1.0))
        for number, (count, warmth, part) in enumerate(rounds):
            chosen, passes = distinct(pool, count), part * workbench.left
            for found in chosen:
                better = workbench.refined(found, passes / len(chosen), warmth, number)
                pool += [better, *workbench.dense(better)]
        return workbench.unpack(min(pool, key=_merit))


def _miniature(problem: Problem, budget: float) -> Problem:
    """The largest one of which all seeds can be screened; the problem itself if that is it.

    It has a half, a third, ... of the ranks: whether a pattern's passes collide depends on what divides their number.
    """
    num_seeds = sum(1 for _ in seeds(problem))
    for part in range(1, problem.num_ranks):
        small = problem.miniature(-(-problem.num_ranks // part))
        passes = 3 * small.num_stages * small.num_microbatches
        if num_seeds * (2 * _COMPACTING + 3) * passes <= budget:
            return small
    return problem.miniature(1)


def _screened(workbench: Workbench, floor: float) -> Iterator[Found]:
    """Every seed, or as many as bring the budget down to ``floor``."""
    for seed in seeds(workbench.problem):
        yield from workbench.derive(Derivation(seed, 0.0, None, 2))
        if workbench.left < floor:
            return


def _varied(workbench: Workbench, floor: float, pool: list[Found]) -> Iterator[Found]:
    """The pool, and more of its best seeds."""
    yield from pool
    shares = _SHARES[: 1 if workbench.problem.num_stages == workbench.problem.num_ranks else None]
    for seed in dict.fromkeys(found.derivation.seed for found in sorted(pool, key=_merit) if found.derivation):
        for haste in _HASTES:
            for share in shares:
                if workbench.left < floor:
                    return
                if haste or share:
                    yield from workbench.derive(Derivation(seed, haste, share, _STEPS))


def _ranked(workbench: Workbench, floor: float, pool: list[Found]) -> list[Derivation]:
    """The derivations of the pool, those first whose rows are shortest once their W's are refilled."""
    ranked: list[tuple[tuple[float, float], int, Derivation | None]] = []
    for found in distinct(pool, len(pool)):
        others = workbench.refilled(found, thorough=False) if workbench.left > floor else ()
        ranked.append((min(map(_merit, (found, *others))), len(ranked), found.derivation))
    ranked.sort(key=lambda entry: entry[:2])
    return list(dict.fromkeys(derivation for *_, derivation in ranked if derivation))


def _derived(workbench: Workbench, floor: float, derivations: list[Derivation]) -> Iterator[Found]:
    """What derivations made for a miniature give here: of each the last step, which is what ranked it."""
    derived = 0
    for derivation in derivations:
        results = list(workbench.derive(derivation))
        yield from results[-1:]
        derived += bool(results)
        if derived == _MOST_REFILLED or workbench.left < floor:
            return


def _classic(workbench: Workbench) -> Iterator[Found]:
    """The classics, compacted once and refilled."""
    for seed in classics(workbench.problem):
        for found in list(workbench.derive(Derivation(seed, 0.0, None, 1)))[-1:]:
            yield min((found, *workbench.refilled(found, thorough=False)), key=_merit)


def _most_held(problem: Problem, share: float) -> list[int]:
    """How many microbatches each stage of a V may keep, so that those on their way up always find room."""
    p = problem.num_ranks
    most = [0] * (2 * p)
    for rank in range(p):
        up = 2 * p - 1 - rank
        room = int(problem.limit[rank] / max(problem.kept[rank], problem.kept[up]))
        most[up] = min(rank + 1, max(1, int(share * room) if share < 1 else room - 1))
        most[rank] = max(1, room - most[up])
    return most


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

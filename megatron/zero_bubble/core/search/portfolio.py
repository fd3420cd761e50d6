"""The search for one placement: compact many patterns, and polish the best.

1. Screen: compact every seed once forward and once backward. For a large problem this uses a miniature with fewer ranks
   and microbatches, because the quality of a pattern hardly depends on its size.
2. Vary: compact the most promising seeds in several ways.
3. Derive: after a miniature, repeat the best derivations (a seed and the way it was compacted) on the whole problem.
4. Refill: place the W passes of the best rows again, with shorter and shorter targets.
5. Polish: local search, compaction, local search again.

The budget is counted in placed passes, so that the result does not depend on the speed of the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.score import ROUNDING
from megatron.zero_bubble.core.search.evaluate import INFEASIBLE
from megatron.zero_bubble.core.search.loops import Packed, compiled, loops
from megatron.zero_bubble.core.search.problem import Problem, Rows
from megatron.zero_bubble.core.search.published import published
from megatron.zero_bubble.core.search.refill import Eagerness
from megatron.zero_bubble.core.search.seeds import Seed, classics, seeds, serial

_BUDGET, _BUDGET_PER_PASS = (1_500_000, 60_000_000), (20, 300)
"""The budget in placed passes, without and with the compiled loops: a constant, and a factor for the problem's size."""
_MOST_RANKS, _BUDGET_ABOVE = 16, (0.6, 0.4)
"""With more ranks than this, a miniature has fewer ranks, and this share of the constant budget is enough: for one
stage per rank, and for two, whose plans also take twice as long to lower.
"""
_FULL_BUDGET_RANKS = 64
"""With more ranks than this, the budget grows only with the passes per rank."""
_SCREENED, _VARIED, _RANKED, _DERIVED, _REFILLED, _SETTLED = 0.24, 0.30, 0.36, 0.66, 0.84, 0.92
"""Shares of the budget after which each of these steps stops; the rest is for polishing."""
_COMPACTING = 8
"""Cost of placing a pass in ``compact``, relative to ``evaluate``."""
_HASTES = (0.0, 0.3, 0.6)
_SURVEYED = (0.0, 0.6)
"""Hastes with which surveyed seeds are compacted."""
_SURVEYED_AT_ONCE, _SHARE_ON_HALF = 64, 3
"""With more ranks than this, the survey tries on all ranks only one of so many seeds: the best on half of the ranks."""
_SHARES = (None, 0.5, 1.0)
"""Largest share of a V's memory that is reserved for microbatches on the way up. None reserves nothing; 1.0 leaves room
for one microbatch on the way down."""
_STEPS = 4
"""Number of compactions in turn, forward and backward."""
_MOST_REFILLED, _MOST_POLISHED = 64, 6
_EAGERNESS = (0.6, 1.0, 0.3)
_AMBITIONS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Shares of its idle time by which a schedule has to become shorter when its W passes are refilled. Unless a refill is
thorough, only some of the ambitions and eagernesses are tried.
"""
_EPSILON = 1e-6
_HEAT = 0.1
"""Initial heat of the local search, as a share of a microbatch's work."""


class Derivation(NamedTuple):
    """The origin of rows: ``steps`` compactions of a seed, forward first, then in alternating directions."""

    seed: Seed
    haste: float
    share: float | None
    steps: int


class PricedRows(NamedTuple):
    """Rows and their cost; the smallest is the best."""

    cost: float
    mean: float
    rows: Packed
    derivation: Derivation | None = None


class Workbench:
    """Makes rows for one problem within a budget of placed passes.

    Args:
        ends: whether nothing is left of the budget once no rank waits in some rows, because none are better.
        least: a lower bound on the cost; once some rows have it, nothing is left of the budget either.
    """

    def __init__(self, problem: Problem, budget: float, ends: bool = False, least: float = -INFEASIBLE) -> None:
        self.problem, self.left = problem, budget
        self._best = sum(problem.work) / problem.num_ranks * (1 + ROUNDING) if ends else -INFEASIBLE
        self._least = least + abs(least) * ROUNDING
        self._loops = loops(problem)
        self._passes = 3 * problem.num_stages * problem.num_microbatches
        self._raw: dict[Seed, Packed] = {}

    def given(self, rows: Rows) -> PricedRows:
        return self._priced(self._loops.pack(rows))

    def unpack(self, found: PricedRows) -> Rows:
        return self._loops.unpack(found.rows)

    def derive(self, derivation: Derivation) -> Iterator[PricedRows]:
        """Yield the rows of the seed and after every compaction, as far as they are feasible."""
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

    def dense(self, found: PricedRows) -> Iterator[PricedRows]:
        """Yield ``found`` compacted, in both directions."""
        for backwards in (True, False):
            rows = self._compacted(found.rows, None, 0.0, backwards)
            if rows is not None:
                yield self._priced(rows)

    def refilled(self, found: PricedRows, thorough: bool) -> Iterator[PricedRows]:
        """Yield ``found`` with its W passes in other places."""
        work = max(self.problem.work)
        for eagerness in _EAGERNESS if thorough else _EAGERNESS[:2]:
            best = INFEASIBLE
            for ambition in _AMBITIONS if thorough else _AMBITIONS[::3]:
                target = best - ambition * (best - work) if best < INFEASIBLE else INFEASIBLE
                if (other := self.filled(found, Eagerness.even(eagerness), target)) is not None:
                    best = min(best, other.cost)
                    yield other

    def filled(self, found: PricedRows, eagerness: Eagerness, target: float) -> PricedRows | None:
        """Return ``found`` with its W passes in other places; None if they do not fit in memory."""
        self.left -= 2 * self._passes
        rows = self._loops.refill(found.rows, eagerness, target)
        return None if rows is None else self._priced(rows)

    def loosened(self, found: PricedRows) -> Iterator[PricedRows]:
        """Yield ``found`` compacted and refilled: after W passes moved, there is room for F and B, then for W again."""
        for denser in self.dense(found):
            yield from self.refilled(denser, thorough=False)

    def settled(self, found: PricedRows, floor: float) -> Iterator[PricedRows]:
        """Yield ``found`` loosened until this no longer helps, and then refilled thoroughly. Stop when the budget is
        down to ``floor``.
        """
        while self.left > floor:
            better = min(self.loosened(found), default=found, key=merit)
            if better.cost >= found.cost - _EPSILON:
                yield from self.refilled(found, thorough=True)
                return
            yield better
            found = better

    def refined(self, found: PricedRows, passes: float, heat: float, seed: int) -> PricedRows:
        """Return ``found`` after a local search that places at most ``passes`` passes."""
        tries = int(min(passes, self.left) / self._passes)
        if tries < 2:
            return found
        self.left -= tries * self._passes
        return self._priced(self._loops.refine(found.rows, tries, heat, seed)[1])

    def _compacted(self, rows: Packed, most_held: list[int] | None, haste: float, backwards: bool) -> Packed | None:
        self.left -= _COMPACTING * self._passes
        return self._loops.compact(rows, most_held, haste, backwards)

    def _priced(self, rows: Packed, derivation: Derivation | None = None) -> PricedRows:
        self.left -= self._passes
        found = PricedRows(*self._loops.evaluate(rows), rows, derivation)
        if found.mean <= self._best or found.cost <= self._least:
            self.left = min(self.left, 0.0)
        return found


class Draft:
    """The best rows of one way to search, before polishing.

    Attributes:
        problem: the problem of the rows.
        cost: the cost of the best rows.
    """

    def __init__(self, workbench: Workbench, pool: Iterable[PricedRows]) -> None:
        self._workbench, self._pool = workbench, distinct(pool, _MOST_POLISHED)
        self.problem, self.cost = workbench.problem, self._pool[0].cost

    def polish(self) -> Iterator[tuple[float, Rows]]:
        """Alternate local search and compaction with the rest of the budget; yield the best rows and their costs."""
        pool, workbench = self._pool, self._workbench
        heat = _HEAT * max(self.problem.work) / self.problem.num_microbatches
        # Number of rows, heat and share of the budget left; the heat falls from round to round.
        rounds = ((_MOST_POLISHED, 0.0, 0.3), (_MOST_POLISHED // 2, 2 * heat, 0.4), (2, heat, 0.5), (1, heat / 2, 1.0))
        for number, (count, warmth, part) in enumerate(rounds):
            chosen, passes = distinct(pool, count), part * workbench.left
            for found in chosen:
                better = workbench.refined(found, passes / len(chosen), warmth, number)
                pool += [better, *workbench.dense(better)]
        yield from ((found.cost, workbench.unpack(found)) for found in distinct(pool, _MOST_POLISHED))


def draft(problem: Problem, effort: float, known: Iterable[Rows] = (), least: float = -INFEASIBLE) -> Draft:
    """Search from all seeds, the published schedules and ``known`` rows; the result is not longer than these.

    Args:
        least: a lower bound on the cost, which ends the search once it is reached.
    """
    is_compiled = compiled() is not None
    passes = 3 * problem.num_stages * problem.num_microbatches
    is_large = problem.num_ranks > _MOST_RANKS
    part = _BUDGET_ABOVE[not problem.is_line] if is_large else 1.0
    per_pass = _BUDGET_PER_PASS[is_compiled] * min(1.0, _FULL_BUDGET_RANKS / problem.num_ranks)
    budget = effort * (_BUDGET[is_compiled] * part + per_pass * passes) * (problem.share_of_a_vee if is_large else 1.0)
    small = _miniature(problem, _SCREENED * budget)
    workbench = Workbench(small, budget, small is problem, least if small is problem else -INFEASIBLE)
    pool = list(_varied(workbench, (1 - _VARIED) * budget, list(_screened(workbench, (1 - _SCREENED) * budget))))
    if small is not problem:
        derivations = _ranked(workbench, (1 - _RANKED) * budget, pool)
        workbench = Workbench(problem, workbench.left, True, least)
        pool = list(_derived(workbench, (1 - _DERIVED) * budget, derivations, _surveyed(problem)))
    pool = distinct(pool, _MOST_REFILLED)
    # One microbatch at a time, compacted: equal to a greedy list schedule after its W passes fill the gaps.
    greedy = [found for haste in _HASTES for found in workbench.derive(Derivation(serial, haste, None, 2))]
    classic = list(_classic(workbench))
    given = list(_given(workbench, known))
    best, candidates = [*given], [*distinct(classic, 3), *pool[:2], *distinct(greedy, 2), *pool[2:]]
    pool += [*given, *classic, *greedy]
    for found in candidates:
        if workbench.left < (1 - _REFILLED) * budget:
            break
        if filled := list(workbench.refilled(found, thorough=False)):
            filled += workbench.loosened(min(filled, key=merit))
            pool += filled
            best.append(min(filled, key=merit))
    for found in distinct(best, _MOST_POLISHED):
        pool += workbench.settled(found, (1 - _SETTLED) * budget)
    return Draft(workbench, pool)


def _miniature(problem: Problem, budget: float) -> Problem:
    """Return the largest miniature on which all seeds can be screened; it may be the problem itself.

    It has a half, a third, ... of the ranks, because whether the passes of a pattern collide depends on the divisors of
    the number of ranks.
    """
    num_seeds = sum(1 for _ in seeds(problem))
    for part in range(1, problem.num_ranks):
        small = problem.miniature(-(-problem.num_ranks // part))
        passes = 3 * small.num_stages * small.num_microbatches
        if num_seeds * (2 * _COMPACTING + 3) * passes <= budget:
            return small
    return problem.miniature(1)


def _screened(workbench: Workbench, floor: float) -> Iterator[PricedRows]:
    """Derive rows from every seed, or until the budget is down to ``floor``."""
    for seed in seeds(workbench.problem):
        yield from workbench.derive(Derivation(seed, 0.0, None, 2))
        if workbench.left < floor:
            return


def _varied(workbench: Workbench, floor: float, pool: list[PricedRows]) -> Iterator[PricedRows]:
    """Yield the pool, and more rows derived from its best seeds."""
    yield from pool
    shares = _SHARES[: None if workbench.problem.is_vee else 1]
    for seed in dict.fromkeys(found.derivation.seed for found in sorted(pool, key=merit) if found.derivation):
        for haste in _HASTES:
            for share in shares:
                if workbench.left < floor:
                    return
                if haste or share:
                    yield from workbench.derive(Derivation(seed, haste, share, _STEPS))


def _ranked(workbench: Workbench, floor: float, pool: list[PricedRows]) -> list[Derivation]:
    """Return the derivations of the pool, in order of the length of their rows after a refill."""
    ranked: list[tuple[tuple[float, float], int, Derivation | None]] = []
    for found in distinct(pool, len(pool)):
        others = workbench.refilled(found, thorough=False) if workbench.left > floor else ()
        ranked.append((min(map(merit, (found, *others))), len(ranked), found.derivation))
    ranked.sort(key=lambda entry: entry[:2])
    return list(dict.fromkeys(derivation for *_, derivation in ranked if derivation))


def _surveyed(problem: Problem) -> list[Derivation]:
    """Rank the feasible seeds by their cost without compaction, with the whole memory limit."""
    by_length = _survey(problem, seeds(problem))
    return [Derivation(seed, haste, None, _STEPS) for seed in by_length for haste in _SURVEYED]


def _survey(problem: Problem, candidates: Iterable[Seed]) -> list[Seed]:
    """Return the feasible seeds among ``candidates``, in the order of their costs.

    A seed repeats its steady state, so the costs of two short runs give that of all microbatches. Above a number of
    ranks, only seeds that are good on half of the ranks run on all.
    """
    p, m = problem.num_ranks, problem.num_microbatches
    if p > _SURVEYED_AT_ONCE:
        on_half = _survey(problem.miniature(p // 2), candidates)
        candidates = on_half[: max(1, len(on_half) // _SHARE_ON_HALF)]
    counts = (m,) if m <= 2 * p else (p, 2 * p)
    short = [Workbench(problem.shortened(count), INFEASIBLE) for count in counts]
    ranked = []
    for number, seed in enumerate(candidates):
        costs: list[float] = []
        for bench in short:
            found = next(bench.derive(Derivation(seed, 0.0, None, 0)), None)
            if found is None:
                break
            costs.append(found.cost)
        else:
            ranked.append((costs[-1] + (costs[-1] - costs[0]) * (m - counts[-1]) / p, number, seed))
    return [seed for *_, seed in sorted(ranked, key=lambda entry: entry[:2])]


def _derived(
    workbench: Workbench, floor: float, derivations: list[Derivation], surveyed: list[Derivation]
) -> Iterator[PricedRows]:
    """Apply the best derivations of both lists in turn. Of a miniature's derivation, only the last step counts, which
    determined its rank; of a surveyed one, every step.
    """
    for pair in zip_longest(surveyed, derivations):
        for derivation, steps in zip(pair, (slice(None), slice(-1, None)), strict=True):
            if derivation is not None:
                results = list(workbench.derive(derivation))
                yield from results[steps]
            if workbench.left < floor:
                return


def _classic(workbench: Workbench) -> Iterator[PricedRows]:
    """Yield the classics, compacted once and refilled."""
    for seed in classics(workbench.problem):
        for found in list(workbench.derive(Derivation(seed, 0.0, None, 1)))[-1:]:
            yield min((found, *workbench.refilled(found, thorough=False)), key=merit)


def _given(workbench: Workbench, known: Iterable[Rows]) -> Iterator[PricedRows]:
    """Yield the known and the published schedules that fit in memory; those on a V also with their W passes refilled.

    With one stage per rank, the classics are refilled instead. A known schedule that is a published one counts once, so
    that giving it changes nothing.
    """
    problem = workbench.problem
    schedules = list(published(problem))
    for rows in schedules:
        found = workbench.given(rows)
        if found.cost < INFEASIBLE:
            refilled = workbench.refilled(found, thorough=True) if problem.num_stages > problem.num_ranks else ()
            yield min((found, *refilled), key=merit)
    for rows in known:
        if rows not in schedules and (found := workbench.given(rows)).cost < INFEASIBLE:
            yield found


def _most_held(problem: Problem, share: float) -> list[int]:
    """Return a limit of microbatches for each stage of a V, such that microbatches on the way up always have room."""
    p = problem.num_ranks
    most = [0] * (2 * p)
    for rank in range(p):
        up = 2 * p - 1 - rank
        room = int(problem.limit[rank] / max(problem.kept[rank], problem.kept[up]))
        most[up] = min(rank + 1, max(1, int(share * room) if share < 1 else room - 1))
        most[rank] = max(1, room - most[up])
    return most


def distinct(pool: Iterable[PricedRows], count: int) -> list[PricedRows]:
    """Return the best ``count`` rows with different costs."""
    chosen: dict[tuple[float, float], PricedRows] = {}
    for found in sorted(pool, key=merit):
        chosen.setdefault((round(found.cost, 6), round(found.mean, 6)), found)
        if len(chosen) == count:
            break
    return list(chosen.values())


def merit(found: PricedRows) -> tuple[float, float]:
    return found.cost, found.mean

"""``zb_auto`` searches for the best schedule for given costs and memory limit; ``fit`` improves a known schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from operator import itemgetter
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.bounds import lower_bound
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.score import is_less, limits_of
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.errors import Refusal, UserError, attempted
from megatron.zero_bubble.core.ir import Placement, Schedule
from megatron.zero_bubble.core.ir.garbage import without_gc
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search.evaluate import INFEASIBLE
from megatron.zero_bubble.core.search.extend import Extension, enough, is_roomy
from megatron.zero_bubble.core.search.placements import PLACEMENTS, NumChunks, PlacementChoice, Placements, placements
from megatron.zero_bubble.core.search.portfolio import Draft, draft
from megatron.zero_bubble.core.search.problem import Problem, Rows
from megatron.zero_bubble.core.search.published import one_is_shorter
from megatron.zero_bubble.core.search.steep import effort_besides, steep_draft
from megatron.zero_bubble.core.search.timed import timed

__all__ = ["PLACEMENTS", "NumChunks", "PlacementChoice", "fit", "placements", "zb_auto"]

_CLOSE = 1.01
"""Of two placements whose drafts differ by less than this factor, both are polished."""
_MANY_PASSES = 20_000
"""Above this number of passes, longest paths are not worth their time, and only one loop or wave is searched."""
_SCREENED, _MOST_SEARCHED = 0.2, 2
"""The effort, relative to a search, with which several loops and waves are compared, and how many of them are then
searched.
"""
_MOST_KEPT = 64
"""Results of searches that are kept."""
CostsAndMemory = tuple[PassCosts, PassMemory]


@without_gc()
def zb_auto(
    costs: PassCosts,
    memory: PassMemory,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: float | Sequence[float],
    *,
    placement: Placements = "auto",
    num_chunks: NumChunks = None,
    objective: Metric = "span",
    effort: float = 1.0,
    start: Schedule | None = None,
    linear: CostsAndMemory | None = None,
    figures: Callable[[Placement], CostsAndMemory] | None = None,
    ends: bool = False,
) -> Schedule:
    """Search for the schedule with the smallest ``objective`` within ``memory_limit``; equal on every machine.

    Args:
        costs: figures for any multiple of ``num_ranks`` stages; ``costs.fit(schedule.placement)`` converts them to the
            stages of the result. A placement whose stages they cannot be converted to is left out of several.
        memory: memory figures, for any such number of stages.
        num_ranks: number of pipeline ranks.
        num_microbatches: microbatches per iteration, 1 or more.
        memory_limit: memory limit in the unit of ``memory``; one figure, or one figure per rank.
        placement: one stage per rank (``linear``), two in a V (``vee``), several in a loop (``loop``, Megatron's
            virtual pipeline) or in a wave (``wave``), or the best of several (``auto``); or the placements themselves.
        num_chunks: stages per rank of a loop or a wave, or ``auto`` for the best of a few numbers. ``auto`` placements
            are one stage per rank and a V, unless this is given: then also loops and waves (see ``placements``).
        objective: ``span`` if the optimizer does not wait for other ranks, ``makespan`` if it does.
        effort: the budget of the search in placed passes, relative to the default; it is not a time, so that the result
            does not depend on the machine.
        start: a known schedule to start from; the result is not longer, if this schedule is within the limit.
        linear: figures with one stage per rank, if layers are divided in such a way that neighbouring stages of
            ``costs`` and ``memory`` together are not those of a rank.
        figures: the figures for each placement, instead of all others; where it raises ``UserError``, the placement is
            left out of several.
        ends: whether the search for a placement ends at its lower bound. The schedule is then the shortest, but it may
            be worse in other respects, such as room for further passes.

    Raises:
        UserError: for counts below 1, figures for another number of stages, or a limit that admits no schedule; the
            message gives the least limit that does.
    """
    for name, count in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if count < 1:
            raise UserError(f"{name} must be 1 or more; got {count}")
    limit = limits_of(memory_limit, num_ranks)
    find = figures or partial(_fitted, costs=costs, memory=memory, linear=linear)
    of = _figures_of(placements(placement, num_ranks, num_chunks), find)
    problems = [Problem.of(Workload(on, num_microbatches), *own, limit, objective) for on, own in of.items()]
    feasible = [problem for problem in problems if problem.is_feasible]
    if not feasible:
        raise UserError(_too_tight(problems, limit, memory_limit))
    bound = partial(_least, figures=of, limit=limit, objective=objective)
    best = _solved(_Task(tuple(feasible), effort, start, ends, bound))
    if best is None:
        raise UserError(
            f"the search found no schedule within the memory limit of {max(limit):g} per rank, although one "
            f"microbatch fits; got {num_microbatches} microbatches; raise the limit"
        )
    return best.problem.schedule("zb-auto", best.rows)


def _fitted(on: Placement, costs: PassCosts, memory: PassMemory, linear: CostsAndMemory | None) -> CostsAndMemory:
    """Convert the figures to the stages of a placement."""
    own = linear if linear is not None and on.num_stages == on.num_ranks else (costs, memory)
    return own[0].fit(on), own[1].fit(on)


def _figures_of(
    choices: Sequence[Placement], find: Callable[[Placement], CostsAndMemory]
) -> dict[Placement, CostsAndMemory]:
    """Return the figures of every placement that has any.

    Raises:
        UserError: if none has.
    """
    found: dict[Placement, CostsAndMemory] = {}
    refused: list[Refusal] = []
    for on in choices:
        own = attempted(partial(find, on))
        if isinstance(own, Refusal):
            refused.append(own)
        else:
            found[on] = own
    if not found:
        raise UserError(refused[0].reason)
    return found


class _Known(NamedTuple):
    """Rows for a problem."""

    rows: Rows
    problem: Problem


@dataclass(frozen=True)
class _Task:
    """What a search depends on.

    Attributes:
        bound: a lower bound on a problem, which follows from the problem.
    """

    problems: tuple[Problem, ...]
    effort: float
    start: Schedule | None
    ends: bool
    bound: Callable[[Problem], float] = field(compare=False)


@lru_cache(maxsize=_MOST_KEPT)
def _solved(task: _Task) -> _Known | None:
    """The best rows; None if there are none.

    Plans that differ only in what is added to a schedule, such as vocabulary parallelism, search for the same one.
    """
    start, problems, bound, effort = task.start, task.problems, task.bound, task.effort
    known = [_Known(p.rows(start), p) for p in problems if start and start.placement == p.placement]
    best, is_shortest = _planned_as_few(problems, bound, effort, known)
    if best is not None and is_shortest:
        return best
    known += [best] if best is not None else []
    found = _search(problems, bound, effort, known, task.ends)
    return _Known(*found[0][1:]) if found else None


def _search(
    problems: Sequence[Problem],
    bound: Callable[[Problem], float],
    effort: float,
    known: Sequence[_Known],
    ends: bool = False,
) -> list[tuple[float, Rows, Problem]]:
    """Return good rows for ``problems`` (one problem per placement) with their costs, shortest first.

    The first placements are one stage per rank and a V. The others only add to what is found on them, so that more
    choices never make a result longer.

    Args:
        ends: whether rows that reach their bound end the search for their placement.
    """
    first = [problem for problem in problems if problem.is_line or problem.is_vee]
    found = _compared(first, bound, effort, known, ends) if first else []
    others = [problem for problem in problems if problem not in first]
    if len(others) > 1:
        others = _promising(others, bound, effort, found[0][0] if found else INFEASIBLE)
    for problem in others:
        if not found or is_less((bound(problem),), (found[0][0],)):
            found = sorted(found + _compared([problem], bound, effort, known, ends), key=itemgetter(0))
    return found


def _promising(
    problems: Sequence[Problem], bound: Callable[[Problem], float], effort: float, cost: float
) -> list[Problem]:
    """Return the problems with the shortest drafts, shortest first, of those whose bound is below ``cost``."""
    drafts = [
        (draft(problem, _SCREENED * effort).cost, number, problem)
        for number, problem in enumerate(problems)
        if is_less((bound(problem),), (cost,))
    ]
    most = _MOST_SEARCHED if all(map(_is_small, problems)) else 1
    return [problem for *_, problem in sorted(drafts)[:most]]


def _compared(
    problems: Sequence[Problem], bound: Callable[[Problem], float], effort: float, known: Sequence[_Known], ends: bool
) -> list[tuple[float, Rows, Problem]]:
    """Search all of ``problems`` that may be the shortest, as ``_search``."""
    drafts: list[Draft] = []
    for problem in reversed(problems):  # the V first: within 1F1B's memory, it is mostly shorter than the linear bound
        least = bound(problem)
        if not drafts or least <= drafts[0].cost:
            given, ends_at = [rows for rows, of in known if of == problem], least if ends else -INFEASIBLE
            found = draft(problem, effort_besides(problem) * effort, given, ends_at)
            drafts.append(found)
            if is_less((least,), (found.cost,)):
                drafts += filter(None, [steep_draft(problem, effort)])
    close = _CLOSE * min(found.cost for found in drafts)
    polished = [(*rows, found.problem) for found in drafts if found.cost <= close for rows in found.polish()]
    return sorted(polished, key=itemgetter(0))


def _planned_as_few(
    problems: Sequence[Problem], bound: Callable[[Problem], float], effort: float, known: Sequence[_Known]
) -> tuple[_Known | None, bool]:
    """Search with fewer microbatches, and repeat the steady state of the results.

    Returns the best result, and whether a search with all microbatches is unnecessary: the busiest rank never waits in
    the repeated part, and no published or known schedule is shorter. The result is None if all microbatches have to be
    searched, or no result has a steady state.
    """
    few = enough(problems[0].num_ranks, problems[0].num_microbatches)
    if few == problems[0].num_microbatches or any(map(is_roomy, problems)):
        return None, False
    extensions = {problem.placement: Extension(problem, few) for problem in problems}
    best, plan, is_shortest = INFEASIBLE, None, False
    for cost, rows, short in _search([extension.short for extension in extensions.values()], bound, effort, ()):
        extension = extensions[short.placement]
        if extension.least(cost) < best and (longer := extension.of(rows)) is not None:
            whole_cost = extension.cost(longer)
            if whole_cost < best:
                best, plan = whole_cost, _Known(longer, extension.problem)
                is_shortest = extension.never_waits(cost, whole_cost)
    for extension in extensions.values():
        others = (extension.cost(rows) for rows, of in known if of == extension.problem)
        is_shortest = is_shortest and not one_is_shorter(best, extension) and all(other >= best for other in others)
    return plan, is_shortest


def fit(
    schedule: Schedule, costs: PassCosts, memory: PassMemory, *, objective: Metric = "span", ends: bool = False
) -> Schedule:
    """Refit a schedule on a V or a loop that was made for passes of equal length to these costs; the result is never
    longer.

    Args:
        schedule: the schedule to refit; the result has its name, and no rank exceeds the peak of its fullest rank.
        costs: costs of its stages.
        memory: memory of its stages.
        objective: as in ``zb_auto``.
        ends: as in ``zb_auto``.

    Raises:
        UserError: for figures for another number of stages.
    """
    limit = max(most_kept(timed(schedule, costs, memory), memory))
    sizes = schedule.num_ranks, schedule.num_microbatches
    how = {"placement": (schedule.placement,), "objective": objective, "start": schedule, "ends": ends}
    found = zb_auto(costs, memory, *sizes, limit, **how)  # type: ignore[arg-type]
    return replace(found, name=schedule.name)


def _least(
    problem: Problem,
    figures: Mapping[Placement, tuple[PassCosts, PassMemory]],
    limit: tuple[float, ...],
    objective: Metric,
) -> float:
    """Return a lower bound for the placement of ``problem`` that is cheap to compute: of many passes on more than two
    stages per rank, in closed form.
    """
    on, m = problem.placement, problem.num_microbatches
    costs, memory = figures[on]
    effort = 0 if on.num_stages <= 2 * on.num_ranks or _is_small(problem) else None
    return lower_bound(costs.fit(on), memory.fit(on), Workload(on, m), limit, objective, effort=effort).value_ms


def _is_small(problem: Problem) -> bool:
    return 3 * problem.num_stages * problem.num_microbatches <= _MANY_PASSES


def _too_tight(problems: Sequence[Problem], limit: Sequence[float], memory_limit: object) -> str:
    needs = [problem.least_memory for problem in problems]
    if isinstance(memory_limit, Sequence):
        rank = next(r for r, least in enumerate(needs[0]) if least > limit[r])
        return (
            f"the memory limit admits no schedule: it is {limit[rank]:g} on rank {rank}, but a single microbatch needs "
            f"{min(need[rank] for need in needs):g}; raise the limit to at least that"
        )
    least = min(map(max, needs))
    return (
        f"the memory limit admits no schedule: it is {limit[0]:g} per rank, but a single microbatch needs "
        f"{least:.10g} on the fullest rank; raise the limit to at least that"
    )

"""``zb_auto``: the best schedule found for given costs under a memory limit; ``fit``: one that is known, improved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from megatron.zero_bubble.analysis.bounds import lower_bound
from megatron.zero_bubble.analysis.memory import most_kept
from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.analysis.timeline import Metric
from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement, Schedule
from megatron.zero_bubble.search.portfolio import Draft
from megatron.zero_bubble.search.problem import Problem

PlacementChoice = Literal["linear", "vee", "auto"]
PLACEMENTS: dict[PlacementChoice, Callable[[int], Placement]] = {"linear": Placement.linear, "vee": Placement.vee}
"""From the number of ranks, for each choice but ``auto``."""


def zb_auto(
    costs: PassCosts,
    memory: PassMemory,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: float | Sequence[float],
    *,
    placement: PlacementChoice = "auto",
    objective: Metric = "span",
    effort: float = 1.0,
    start: Schedule | None = None,
) -> Schedule:
    """The schedule with the smallest ``objective`` found, within ``memory_limit``; the same on every machine.

    Args:
        costs: figures for ``num_ranks`` stages, or for twice as many; ``costs.fit(schedule.placement)`` are those of
            the result's stages.
        memory: likewise.
        num_ranks: pipeline ranks.
        num_microbatches: microbatches an iteration, 1 or more.
        memory_limit: what a rank may keep at any time, in the unit of ``memory``; one figure, or one a rank.
        placement: one stage a rank (``linear``), two in a V (``vee``), or the better of both (``auto``).
        objective: ``span`` when the optimizer does not wait for other ranks, ``makespan`` when it does.
        effort: the search's budget of work, in passes placed, relative to the default; not time, so that the result
            does not depend on the machine.
        start: a schedule that is there already; the result is no worse, if it keeps the limit.

    Raises:
        UserError: for counts below 1, figures for another number of stages, or a limit that admits no schedule; the
            message names the least limit that does.
    """
    for name, count in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if count < 1:
            raise UserError(f"{name} must be 1 or more; got {count}")
    limit = _limits(memory_limit, num_ranks)
    names = tuple(PLACEMENTS) if placement == "auto" else (placement,)
    problems = [
        Problem.of(PLACEMENTS[name](num_ranks), num_microbatches, costs, memory, limit, objective) for name in names
    ]
    feasible = [problem for problem in problems if problem.is_feasible]
    if not feasible:
        raise UserError(_too_tight(problems, limit, memory_limit))
    best: Draft | None = None
    for problem in reversed(feasible):  # the V first: within 1F1B's memory it is mostly shorter than one stage can be
        if best is None or _least(problem, costs, memory, limit, objective) <= best.cost:
            known = [problem.rows(start)] if start is not None and start.placement == problem.placement else []
            draft = Draft(problem, effort, known)
            best = draft if best is None or draft.cost <= best.cost else best
    assert best is not None, "one placement at least is feasible"
    return best.problem.schedule("zb-auto", best.polish())


def fit(schedule: Schedule, costs: PassCosts, memory: PassMemory, *, objective: Metric = "span") -> Schedule:
    """A schedule on a V that was made for passes of one length, made anew for these costs; never longer than it.

    Args:
        schedule: its name stays, and so does its memory: no rank keeps more than the fullest rank of it does.
        costs: figures for its stages.
        memory: likewise.
        objective: as in ``zb_auto``.

    Raises:
        UserError: for figures for another number of stages.
    """
    limit = max(most_kept(simulate(schedule, costs, memory), memory))
    sizes = schedule.num_ranks, schedule.num_microbatches
    found = zb_auto(costs, memory, *sizes, limit, placement="vee", objective=objective, start=schedule)
    return replace(found, name=schedule.name)


def _least(
    problem: Problem, costs: PassCosts, memory: PassMemory, limit: tuple[float, ...], objective: Metric
) -> float:
    """What no schedule on the placement of ``problem`` is shorter than, by the bounds that cost nothing."""
    on, m = problem.placement, problem.num_microbatches
    return lower_bound(costs.fit(on), memory.fit(on), on, m, limit, objective, effort=0).value_ms


def _limits(memory_limit: float | Sequence[float], num_ranks: int) -> tuple[float, ...]:
    limits = tuple(memory_limit) if isinstance(memory_limit, Sequence) else (memory_limit,) * num_ranks
    if len(limits) != num_ranks:
        raise UserError(f"a memory limit must be one figure, or one for each of the {num_ranks} ranks; got {limits}")
    return limits


def _too_tight(problems: Sequence[Problem], limit: Sequence[float], memory_limit: object) -> str:
    needs = [problem.least_memory for problem in problems]
    if isinstance(memory_limit, Sequence):
        rank = next(r for r, least in enumerate(needs[0]) if least > limit[r])
        return (
            f"the memory limit admits no schedule: rank {rank} may keep {limit[rank]:g}, and one microbatch alone "
            f"needs {min(need[rank] for need in needs):g}; raise it to that at least"
        )
    least = min(map(max, needs))
    return (
        f"the memory limit admits no schedule: a rank may keep {limit[0]:g}, and one microbatch alone needs "
        f"{least:.10g} on the fullest rank; raise the limit to that at least"
    )

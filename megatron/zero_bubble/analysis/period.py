"""How long training takes from one iteration to the next, with the optimizer step between them.

A synchronous optimizer steps when every rank has ended its passes, since clipping needs the norm of all gradients: an
iteration takes the makespan and a step. With post-validation (arXiv 2401.10241, section 4) a rank steps when it has
ended its own passes and heard of those before it, and validates later: an iteration takes the span and a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.zero_bubble.analysis.progress import progress
from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.ir import Kind, Pass, Schedule

_SETTLED = 6
"""Iterations after which one repeats the other; the first differs, as it waits for nothing."""


def period_ms(schedule: Schedule, costs: PassCosts, step_ms: float, post_validation: bool) -> float:
    """Milliseconds from one iteration to the next, of the slowest rank, once they repeat.

    Args:
        step_ms: what the optimizer step takes on every rank.
        post_validation: whether ranks step before they know the norm of all gradients.
    """
    *_, before, last = iterations(schedule, costs, step_ms, post_validation, _SETTLED)
    return max(b - a for a, b in zip(before, last, strict=True))


def iterations(
    schedule: Schedule, costs: PassCosts, step_ms: float, post_validation: bool, count: int
) -> Iterator[list[float]]:
    """When every rank has ended its optimizer step, in ms, for ``count`` iterations in a row."""
    stage_to_rank = schedule.placement.stage_to_rank
    guarded = _guarded(schedule) if post_validation else frozenset()
    free = [0.0] * schedule.num_ranks
    all_known = 0.0
    for _ in range(count):
        end: dict[Pass, float] = {}
        for rank, p, dependencies in progress(schedule):
            start = max(free[rank], all_known) if p in guarded else free[rank]
            for d in dependencies:
                start = max(start, end[d] + costs.comm(stage_to_rank[d.stage], rank))
            free[rank] = end[p] = start + costs.duration(p, schedule.num_slices)
        all_known = max(free)
        if post_validation:
            for rank in range(1, schedule.num_ranks):  # what the ranks before know comes along with them
                free[rank] = max(free[rank], *free[:rank])
            free = [ms + step_ms for ms in free]
        else:
            free = [all_known + step_ms] * schedule.num_ranks
        yield list(free)


def repeatable(schedule: Schedule) -> list[set[Pass]]:
    """The passes of every rank that run before it knows that the last step was right: its first forwards, as far as
    none of them needs a pass that is not among these. What they compute can be computed again.
    """
    stage_to_rank = schedule.placement.stage_to_rank
    rows = [_leading_forwards(row) for row in schedule.order]
    before = [set(row) for row in rows]
    changed = True
    while changed:
        changed = False
        for rank, row in enumerate(rows):
            for position, p in enumerate(row):
                if any(d not in before[stage_to_rank[d.stage]] for d in schedule.dependencies(p)):
                    rows[rank] = row[:position]
                    before[rank] = set(rows[rank])
                    changed = True
                    break
    return before


def _leading_forwards(row: tuple[Pass, ...]) -> tuple[Pass, ...]:
    first = next((position for position, p in enumerate(row) if p.kind is not Kind.F), len(row))
    return row[:first]


def _guarded(schedule: Schedule) -> frozenset[Pass]:
    """Of every rank the first pass that cannot be done again."""
    kept = repeatable(schedule)
    return frozenset(next(p for p in row if p not in before) for row, before in zip(schedule.order, kept, strict=True))

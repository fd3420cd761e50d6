"""Compute the period of training: the time from one iteration to the next, including the optimizer step.

A synchronous optimizer steps when all ranks have ended their passes, because clipping needs the norm of all gradients:
an iteration takes the makespan and a step. With post-validation (arXiv 2401.10241, section 4) a rank steps when it has
ended its passes and received the partial norms of the ranks before it, and validates the step later: an iteration takes
the span and a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.zero_bubble.core.analysis.simulate import Run
from megatron.zero_bubble.core.analysis.steps import steps
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Pass, Plan, Schedule, Validate
from megatron.zero_bubble.core.ir.ops import STEPPED
from megatron.zero_bubble.core.ir.passes import REPEATABLE

_SETTLED = 6
"""Iterations after which the period is constant; the first iteration differs, because it waits for no other."""


def period_ms(schedule: Schedule, costs: PassCosts, step_ms: float, post_validation: bool) -> float:
    """Return the constant period of the slowest rank in ms.

    Args:
        step_ms: time of the optimizer step on every rank.
        post_validation: whether ranks step before they know the norm of all gradients.
    """
    *_, before, last = iterations(schedule, costs, step_ms, post_validation, _SETTLED)
    return max(b - a for a, b in zip(before, last, strict=True))


def rejection_ms(timeline: Timeline) -> float:
    """Return the time in ms that an iteration loses if it rejects the previous optimizer step, without the steps.

    Every rank runs the forwards before its validation a second time; the last one to validate restarts last.
    """
    counts = map(len, repeatable(timeline.schedule))
    ends = [row[count - 1].end_ms for row, count in zip(timeline.spans, counts, strict=True) if count]
    return max(ends) - timeline.start_ms


def break_even(timeline: Timeline) -> float:
    """Return the probability of a rejected step at which post-validation neither gains nor loses time, from 0 to 1.

    A synchronous step costs every iteration the difference between makespan and span; a rejected step costs
    ``rejection_ms``.
    """
    return min(1.0, (timeline.makespan_ms - timeline.span_ms) / rejection_ms(timeline))


def iterations(
    schedule: Schedule, costs: PassCosts, step_ms: float, post_validation: bool, count: int
) -> Iterator[list[float]]:
    """Yield, for ``count`` consecutive iterations, the times in ms at which the ranks end their optimizer steps."""
    plan = Plan.bare(schedule)
    if post_validation:
        rows = zip(plan.ops, validation_positions(plan), strict=True)
        plan = replace(plan, ops=tuple((*row[:at], Validate(), *row[at:]) for row, at in rows))
    run = Run(steps(plan), schedule, costs)
    all_known = 0.0
    for _ in range(count):
        run.iteration({STEPPED: all_known})
        ends = run.free
        all_known = max(ends)
        if post_validation:
            # A rank steps when it has received the state of the ranks before it.
            run.free = [max(ends[: rank + 1]) + step_ms for rank in range(schedule.num_ranks)]
        else:
            run.free = [all_known + step_ms] * schedule.num_ranks
        yield list(run.free)


def repeatable(schedule: Schedule) -> list[set[Pass]]:
    """Return the passes of each rank that may run before it validates the previous step: its first forwards, as long as
    they depend only on passes of these sets. Their results can be computed again, and a validation changes nothing that
    they read (``REPEATABLE``).
    """
    stage_to_rank = schedule.placement.stage_to_rank
    rows = [_leading(row) for row in schedule.order]
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


def _leading(row: tuple[Pass, ...]) -> tuple[Pass, ...]:
    first = next((position for position, p in enumerate(row) if p.kind not in REPEATABLE), len(row))
    return row[:first]


def validation_positions(plan: Plan) -> list[int]:
    """Return the position at which each rank must validate the previous step: its first pass that is not repeatable."""
    found = []
    for rank, (row, kept) in enumerate(zip(plan.ops, repeatable(plan.schedule), strict=True)):
        passes = (position for position, op in enumerate(row) if not kept.issuperset(op.works))
        if (first := next(passes, None)) is None:
            raise PlanError(
                f"rank {rank} of {plan.schedule.name!r} has only repeatable forwards and cannot validate an optimizer "
                "step; validate steps in a plan with backwards"
            )
        found.append(first)
    return found

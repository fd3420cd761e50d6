"""How long training takes from one iteration to the next, with the optimizer step between them.

A synchronous optimizer steps when every rank has ended its passes, since clipping needs the norm of all gradients: an
iteration takes the makespan and a step. With post-validation (arXiv 2401.10241, section 4) a rank steps when it has
ended its own passes and heard of those before it, and validates later: an iteration takes the span and a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.zero_bubble.analysis.simulate import Run
from megatron.zero_bubble.analysis.steps import steps
from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.errors import PlanError
from megatron.zero_bubble.ir import Compute, Kind, Pass, Plan, Schedule, Validate
from megatron.zero_bubble.ir.ops import STEPPED

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
            # What the ranks before know comes along with them.
            run.free = [max(ends[: rank + 1]) + step_ms for rank in range(schedule.num_ranks)]
        else:
            run.free = [all_known + step_ms] * schedule.num_ranks
        yield list(run.free)


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


def validation_positions(plan: Plan) -> list[int]:
    """Where every rank has to know that the last step was right: at its first pass that cannot be done again."""
    found = []
    for rank, (row, kept) in enumerate(zip(plan.ops, repeatable(plan.schedule), strict=True)):
        passes = (position for position, op in enumerate(row) if isinstance(op, Compute) and op.work not in kept)
        if (first := next(passes, None)) is None:
            raise PlanError(
                f"rank {rank} of {plan.schedule.name!r} has forwards only, and these can all be run again; validate "
                "steps in a plan with backwards"
            )
        found.append(first)
    return found

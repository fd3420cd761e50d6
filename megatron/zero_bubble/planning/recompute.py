"""Plan recomputation as passes of its own (R), on the stages whose backwards compute activations again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import fsum
from operator import sub

from megatron.zero_bubble.core.analysis.bounds import Bound
from megatron.zero_bubble.core.analysis.score import Goal
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement, Schedule
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search.recompute import with_recomputation
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.plans import bound
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.setup import Searched

WITH_R = "with R"


def recomputing(question: Question, make: Callable[[Question], Iterator[Schedule]]) -> Iterator[Schedule]:
    """Yield schedules with an R before each backward that needs one: the orders for backwards with their recomputation,
    and those for backwards without it, which begin earlier where ranks wait.

    A rank has at most one R whose B has not ended, so what one keeps is taken from the limit of a search.

    Args:
        make: makes the orders of a question.

    Raises:
        UserError: no stage recomputes, or no order is within the limit.
    """
    costs, limit = question.costs, question.limit
    if limit is not None and question.is_search:
        limit -= max(costs.of_ranks[1].rebuilt) / _stages_per_rank(question)
    made: list[Schedule] = []
    for own in (costs, without_recomputation(costs)):
        for schedule in make(replace(question, costs=own, limit=limit)):
            if schedule not in made:
                made.append(schedule)
                yield with_recomputation(schedule, recomputing_stages(costs, schedule.placement))


def _stages_per_rank(question: Question) -> int:
    """The fewest of the placements of a search."""
    order, num_ranks = question.setup.order, question.costs.num_ranks
    assert isinstance(order, Searched), "only a search has a limit"
    return min(on.num_stages // num_ranks for on in order.placements(num_ranks))


def recomputing_stages(costs: Figures, placement: Placement) -> tuple[int, ...]:
    """The stages whose backwards compute activations again.

    Raises:
        UserError: there are none.
    """
    stages = tuple(stage for stage, ms in enumerate(costs.on(placement)[0].recompute_ms) if ms)
    if not stages:
        raise UserError(
            "recomputation as a pass of its own needs a job that recomputes whole layers; got costs without its time; "
            "give a job with --recompute-granularity full, or costs with recompute_ms, or leave it out"
        )
    return stages


def recomputing_bound(costs: Figures, work: Workload, goal: Goal) -> Bound:
    """Return the lower bound on schedules with R: passes wait only for backwards without it, but ranks run it."""
    passes, ranks = costs.on(work.placement)[0], range(costs.num_ranks)
    times = (passes.forward_ms, passes.backward_ms, passes.wgrad_ms)
    busy = [fsum(of[stage] for of in times for stage in work.placement.stages_of(rank)) for rank in ranks]
    busiest = max(ranks, key=lambda rank: (busy[rank], rank))
    first = min(work.placement.stages_of(busiest))
    waits = fsum(passes.forward_ms[:first]) if goal.objective == "makespan" else 0.0
    own = Bound(waits + work.num_microbatches * busy[busiest], "work", busiest)
    return max(bound(without_recomputation(costs), work, goal), own, key=lambda each: each.value_ms)


def without_recomputation(costs: Figures) -> Figures:
    """The costs of backwards that find their activations computed again."""

    def make(placement: Placement) -> tuple[PassCosts, PassMemory]:
        passes, memory = costs.make(placement)
        backward = tuple(map(sub, passes.backward_ms, passes.recompute_ms))
        return replace(passes, backward_ms=backward, recompute_ms=()), memory

    return replace(costs, make=make)

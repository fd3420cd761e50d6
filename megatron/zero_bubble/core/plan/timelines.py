"""The timelines that plans are compared by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.steps import steps
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.ir.garbage import without_gc
from megatron.zero_bubble.core.ir.vocabulary import algorithm_of
from megatron.zero_bubble.core.plan.plan_of import NOTHING, Additions, plan_of_times, plan_without_messages
from megatron.zero_bubble.core.plan.prove import prove
from megatron.zero_bubble.core.search.timed import timed


def timeline_of(
    schedule: Schedule, costs: PassCosts, memory: PassMemory | None = None, added: Additions = NOTHING
) -> Timeline:
    """The timeline of a schedule as it runs: the collectives of vocabulary parallelism take turns on their lanes, and
    copies and gathers have lanes of their own.

    Searches leave these waiting times out. Args and errors are those of ``simulate``.
    """
    return next(timelines_of(schedule, (costs,), memory, added))


def timelines_of(
    schedule: Schedule, costs: Iterable[PassCosts], memory: PassMemory | None = None, added: Additions = NOTHING
) -> Iterator[Timeline]:
    """The same for several costs, of a plan that is made once."""
    if not added.ops and algorithm_of(schedule) is None:
        for each in costs:
            yield simulate(schedule, each) if memory is None else timed(schedule, each, memory)
        return
    plan = plan_without_messages(schedule, added) if added.ops else plan_of_times(schedule)
    if added.ops:
        prove(plan)
    rows = without_gc()(steps)(plan)
    for each in costs:
        yield simulate(plan, each, memory, rows)

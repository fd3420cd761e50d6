"""The timelines that plans are compared by."""

from __future__ import annotations

from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.ir import Plan, Schedule
from megatron.zero_bubble.ir.vocabulary import algorithm_of
from megatron.zero_bubble.plan.collect import collect
from megatron.zero_bubble.search.timed import timed


def timeline_of(schedule: Schedule, costs: PassCosts, memory: PassMemory | None = None) -> Timeline:
    """The timeline of a schedule as it runs: the collectives of vocabulary parallelism take turns on their lanes.

    Searches leave these waiting times out. Args and errors are those of ``simulate``.
    """
    if algorithm_of(schedule) is None:
        return simulate(schedule, costs) if memory is None else timed(schedule, costs, memory)
    return simulate(collect(Plan.bare(schedule)), costs, memory)

"""The timeline of a schedule with more ops on its ranks, if these delay no pass: a fraction of the time of a simulation.

The added ops wait only for ops of their own rank. Where no pass waits for them, every pass keeps its time, because none
can start earlier than without them; so each rank is walked on its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.zero_bubble.analysis.memory import peaks
from megatron.zero_bubble.analysis.timeline import LaneSpan, Span, Timeline
from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.ir import Compute, Op, Pass, Plan, Value
from megatron.zero_bubble.ir.ops import COMPUTE

_ROUNDING = 1e-9
"""Share of the length of a timeline by which sums of times may differ."""


def undelayed(before: Timeline, plan: Plan, costs: PassCosts, memory: PassMemory) -> Timeline | None:
    """Return what ``simulate(plan, costs, memory)`` does, but for rounding; None if an op may delay a pass.

    Args:
        before: the simulated schedule of ``plan``, with the same costs.
        plan: the passes of the schedule, and ops that neither wait for other ranks nor let them wait.
    """
    if before.lanes or plan.has_messages:
        return None
    rounding = _ROUNDING * before.makespan_ms
    lanes = []
    for ops, spans in zip(plan.ops, before.spans, strict=True):
        found = _beside(ops, spans, plan, costs, rounding)
        if found is None:
            return None
        lanes.append(tuple(found))
    timeline = Timeline(before.schedule, before.spans, lanes=tuple(lanes))
    return Timeline(before.schedule, before.spans, peaks(timeline, memory), timeline.lanes)


def _beside(
    ops: Sequence[Op], spans: Sequence[Span], plan: Plan, costs: PassCosts, rounding: float
) -> list[LaneSpan] | None:
    """The added ops of one rank with their times; None if a pass would wait for one, or one for another rank."""
    flow, slices = plan.schedule.flow, plan.schedule.slices
    free, lane_free = 0.0, dict[str, float]()
    ready: dict[object, float] = {}  # when what an added op gives is there
    due: dict[Pass, float] = {}  # when the inputs of a pass are there that added ops give
    found: list[LaneSpan] = []
    place, starts = 0, [*(span.start_ms for span in spans), math.inf]
    for op in ops:
        if isinstance(op, Compute):
            if due.get(op.work, 0.0) > starts[place] + rounding:
                return None
            free, place = spans[place].end_ms, place + 1
            continue
        effects = op.effects(flow)
        if effects.waits or effects.makes or effects.arrives or op.lane is None:
            return None
        start = max((free, *(ready[value] for value in (*effects.uses, *effects.takes) if value in ready)))
        if op.lane != COMPUTE:
            start = max(start, lane_free.get(op.lane, 0.0))
        end = start + op.duration_ms(costs, slices)
        if op.lane == COMPUTE and end > starts[place]:
            if end > starts[place] + rounding:
                return None
            start, end = min(start, starts[place]), starts[place]
        found.append(LaneSpan(op.lane, op, start, end, free))
        for value in effects.gives:
            ready[value] = end
            if isinstance(value, Value):
                for work in flow.consumers(value) if value in flow.outputs(value.producer) else ():
                    due[work] = max(end, due.get(work, 0.0))
        if op.lane == COMPUTE:
            free = end
        else:
            lane_free[op.lane] = end
    return found

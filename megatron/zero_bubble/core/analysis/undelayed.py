"""The timeline of a schedule with more ops on its ranks, if they delay no pass: much faster than to simulate it again.

The schedule has been simulated, so its passes run to the end. The added ops neither wait for other ranks nor let them
wait. If on every rank each op finds its values in the order of the row, and no pass waits for an added op, then the
plan runs to the end as well, and every pass keeps its time, because it cannot start earlier than without them. So each
rank is checked on its own, and passes are looked at only where added ops take or give their values.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

from megatron.zero_bubble.core.analysis.memory import peaks
from megatron.zero_bubble.core.analysis.score import ROUNDING
from megatron.zero_bubble.core.analysis.timeline import LaneSpan, Span, Timeline
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Op, Pass, Plan, Value
from megatron.zero_bubble.core.ir.ops import COMPUTE


def undelayed(before: Timeline, plan: Plan, costs: PassCosts, memory: PassMemory) -> Timeline | None:
    """Return what ``simulate(plan, costs, memory)`` does, but for rounding, for a plan that ``prove`` accepts.

    Args:
        before: the simulated schedule of ``plan``, with the same costs.
        plan: the passes of the schedule, and added ops.

    Returns:
        None if an added op may delay a pass or another rank, or if ``prove`` may refuse the plan.
    """
    if before.lanes or plan.has_messages or plan.drain:
        return None
    lanes = []
    for ops, spans in zip(plan.ops, before.spans, strict=True):
        row = _Row(plan, costs, spans, ROUNDING * before.makespan_ms)
        if not row.runs(ops):
            return None
        lanes.append(tuple(row.found))
    timeline = replace(before, lanes=tuple(lanes) if any(lanes) else ())
    return replace(timeline, peak_activation=peaks(timeline, memory))


class _Row:
    """The ops of one rank, walked in order.

    Attributes:
        found: the added ops with their times.
    """

    def __init__(self, plan: Plan, costs: PassCosts, spans: Sequence[Span], rounding: float) -> None:
        self._flow, self._slices, self._costs = plan.schedule.flow, plan.schedule.slices, costs
        self._spans, self._rounding = spans, rounding
        self._starts = [*(span.start_ms for span in spans), math.inf]
        self._done: set[Pass] = set()
        self._free, self._lane_free = 0.0, dict[str, float]()
        self._given: dict[Hashable, float] = {}  # what only added ops take, and when it is there
        self._away: set[Value] = set()  # outputs of passes that added ops have taken
        self._needs: dict[Pass, set[Value]] = {}  # those of them that a pass uses
        self._due: dict[Pass, float] = {}  # when what was given back is there
        self.found: list[LaneSpan] = []

    def runs(self, ops: Sequence[Op]) -> bool:
        """Whether every op has its values, nothing is left at the end, and no pass is delayed."""
        place = 0
        for op in ops:
            if not op.works and not self._adds(op, self._starts[place]):
                return False
            for work in op.works:
                if place == len(self._spans) or not self._follows(work, self._spans[place]):
                    return False
                place += 1
        return place == len(self._spans) and not self._given and not self._away

    def _follows(self, work: Pass, span: Span) -> bool:
        """Whether ``work`` is the next pass of the row, has its values and starts when it did; if so, run it."""
        if work != span.pass_ or self._needs.get(work):
            return False
        if self._due.get(work, 0.0) > span.start_ms + self._rounding:
            return False
        self._free = span.end_ms
        self._done.add(work)
        return True

    def _adds(self, op: Op, next_ms: float) -> bool:
        """Run an added op before a pass that starts at ``next_ms``."""
        effects = op.effects(self._flow)
        if effects.waits or effects.makes or effects.arrives or effects.uses or op.lane is None:
            return False
        start = self._free if op.lane == COMPUTE else max(self._free, self._lane_free.get(op.lane, 0.0))
        for value in effects.takes:
            if value in self._given:
                start = max(start, self._given.pop(value))
            elif not isinstance(value, Value) or not self._takes(value):
                return False
        end = start + op.duration_ms(self._costs, self._slices)
        if op.lane == COMPUTE and end > next_ms:
            if end > next_ms + self._rounding:
                return False
            start, end = min(start, next_ms), next_ms  # in this order, as memory is counted
        for value in effects.gives:
            if value in self._away:
                self._come_back(value, end)
            elif value in self._given:
                return False
            else:
                self._given[value] = end
        self.found.append(LaneSpan(op.lane, op, start, end, self._free))
        if op.lane == COMPUTE:
            self._free = end
        else:
            self._lane_free[op.lane] = end
        return True

    def _takes(self, value: Value) -> bool:
        """Take what a pass of this rank has given, unless an added op has had it, or a pass has used it."""
        if value.producer not in self._done or value in self._away or value not in self._flow.outputs(value.producer):
            return False
        self._away.add(value)
        for work in self._flow.consumers(value):
            if work in self._due or work in self._done:
                return False
            self._needs.setdefault(work, set()).add(value)
        return True

    def _come_back(self, value: Value, at_ms: float) -> None:
        self._away.discard(value)
        for work in self._flow.consumers(value):
            self._needs[work].discard(value)
            self._due[work] = max(at_ms, self._due.get(work, 0.0))

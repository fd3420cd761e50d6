"""Simulate the length and memory of a plan by the rules of the Zero Bubble paper (arXiv 2401.10241, section 2).

Every rank starts its ops in order. An op starts when the rank has reached it, its lane is free, and its inputs are
available; a result of another rank is available one transfer later, and a transfer occupies no lane. The rank proceeds
when the op ends, or immediately if the op is on a lane other than that of the passes. The span of a pass includes the
time that its messages take from the rank (``costs.messages``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from megatron.zero_bubble.core.analysis.deadlock import deadlock
from megatron.zero_bubble.core.analysis.memory import peaks
from megatron.zero_bubble.core.analysis.parts import in_parts, joined
from megatron.zero_bubble.core.analysis.steps import Blocked, Step, advance, steps, steps_of
from megatron.zero_bubble.core.analysis.timeline import LaneSpan, Span, Timeline, divided
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.messages import of_schedule
from megatron.zero_bubble.core.errors import PlanError, UserError
from megatron.zero_bubble.core.ir import Op, Plan, Schedule, Token
from megatron.zero_bubble.core.ir.garbage import without_gc
from megatron.zero_bubble.core.ir.ops import COMPUTE

__all__ = ["Span", "Timeline", "simulate"]


@without_gc()
def simulate(plan: Plan | Schedule, costs: PassCosts, memory: PassMemory | None = None) -> Timeline:
    """Compute the timeline of ``plan``, in time linear in its number of ops.

    Args:
        plan: a proved plan, or a schedule, whose values move between ranks without ops.
        memory: memory of the stages; by default, B frees nothing, and W frees all that F added.

    Raises:
        PlanError: when the ranks of a plan wait for each other.
        ScheduleError: when the order deadlocks; the message names rank and pass.
        UserError: when ``costs`` or ``memory`` are for another number of stages.
    """
    schedule = plan if isinstance(plan, Schedule) else plan.schedule
    memory = PassMemory.uniform(schedule.placement) if memory is None else memory
    for what, figures in (("costs", costs), ("memory", memory)):
        if figures.num_stages != schedule.num_stages:
            raise UserError(
                f"{what} must have one figure per stage; {schedule.name} has {schedule.num_stages} stages and "
                f"{what} {figures.num_stages}; build both from the same placement"
            )
    run = Run(steps_of(plan) if isinstance(plan, Schedule) else steps(plan), schedule, costs)
    try:
        run.iteration({})
    except Blocked:
        if isinstance(plan, Schedule) and (error := deadlock(plan)) is not None:
            raise error from None
        raise PlanError(
            f"the ranks of this plan for {schedule.name!r} wait for each other; prove() shows where"
        ) from None
    spans, lanes = tuple(map(tuple, run.spans)), tuple(map(tuple, run.lanes))
    messages = costs.messages_on(schedule.placement) if costs.message_ms else ()
    timeline = Timeline(schedule, spans, lanes=lanes if any(lanes) else (), messages=messages)
    return replace(timeline, peak_activation=peaks(timeline, memory))


class Run:
    """The simulation of consecutive iterations of a plan.

    Attributes:
        free: the time in ms at which each rank has ended its passes. The next iteration starts then, while ops on other
            lanes may still run.
        spans, lanes: the passes of each rank in the last iteration, and its ops on other lanes.
    """

    def __init__(self, rows: Sequence[Iterable[Step]], schedule: Schedule, costs: PassCosts) -> None:
        self._rows, self._figures = rows, of_schedule(costs, schedule)
        self.free = [0.0] * len(rows)
        self._lane_free: list[dict[str, float]] = [{} for _ in rows]

    def iteration(self, given_ms: Mapping[Token, float]) -> None:
        """Run the plan once; ``given_ms`` has the tokens of the previous iteration and the times at which they hold.

        Raises:
            Blocked: when the ranks wait for each other.
        """
        made: dict[Hashable, tuple[float, int | None]] = {token: (ms, None) for token, ms in given_ms.items()}
        ends: list[list[float]] = [[] for _ in self.free]
        self.spans: list[list[Span]] = [[] for _ in self.free]
        self.lanes: list[list[LaneSpan]] = [[] for _ in self.free]
        costs = self._figures[0]
        comm = costs.comm
        for rank, _, (op, after, waits, makes) in advance(in_parts(self._rows, costs), made):
            own = ends[rank]
            # An op waits for results of its rank and of others; the rank itself waits only for those of others.
            ready = waited = self.free[rank]
            for position in after:
                if own[position] > ready:
                    ready = own[position]
            for token in waits:
                ms, source = made[token]
                if source != rank:
                    if source is not None:
                        ms += comm(source, rank) + op.arrival_ms(costs, token)
                    if ms > waited:
                        waited = ms
                if ms > ready:
                    ready = ms
            end = self._occupy(rank, op, ready, waited)
            own.append(end)
            for token in makes:
                made[token] = end, rank
        self.spans, self.lanes = joined(self.spans, self.lanes)

    def _occupy(self, rank: int, op: Op, ready: float, waited: float) -> float:
        """Run an op on its lane, once its inputs are there and the lane is free; return the time at which it ends."""
        lane, lanes, reached = op.lane, self._lane_free[rank], self.free[rank]
        start = ready if lane is None else max(ready, lanes.get(lane, 0.0))
        end = start + op.duration_ms(*self._figures)
        if lane is None:
            self.free[rank] = waited
            return end
        lanes[lane] = end
        if lane == COMPUTE:
            self.free[rank] = end
        if works := op.works:
            self.spans[rank].extend(divided(works, start, end))
        else:
            self.lanes[rank].append(LaneSpan(lane, op, start, end, reached))
        return end

"""Simulate the length and memory of a plan by the rules of the Zero Bubble paper (arXiv 2401.10241, section 2).

Every rank starts its ops in order. An op starts when the rank has reached it, its lane is free, and its inputs are
available; a result of another rank is available one transfer later, and a transfer occupies no lane. The rank proceeds
when the op ends, or immediately if the op is on a lane other than that of the passes. The span of a pass includes the
time that its messages take from the rank (``costs.messages``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from megatron.zero_bubble.core.analysis.deadlock import deadlock
from megatron.zero_bubble.core.analysis.lanes import Made, lanes_of
from megatron.zero_bubble.core.analysis.memory import peaks
from megatron.zero_bubble.core.analysis.steps import Blocked, Step, advance, steps, steps_of
from megatron.zero_bubble.core.analysis.timeline import Span, Timeline
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.messages import of_schedule
from megatron.zero_bubble.core.errors import PlanError, UserError
from megatron.zero_bubble.core.ir import Plan, Schedule, Token
from megatron.zero_bubble.core.ir.garbage import without_gc

__all__ = ["Span", "Timeline", "simulate"]


@without_gc()
def simulate(
    plan: Plan | Schedule, costs: PassCosts, memory: PassMemory | None = None, rows: Sequence[Iterable[Step]] = ()
) -> Timeline:
    """Compute the timeline of ``plan``, in time linear in its number of ops.

    Args:
        plan: a proved plan, or a schedule, whose values move between ranks without ops.
        memory: memory of the stages; by default, B frees nothing, and W frees all that F added.
        rows: the steps of the plan, if they are known.

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
    run = Run(rows or (steps_of(plan) if isinstance(plan, Schedule) else steps(plan)), schedule, costs)
    try:
        run.iteration({})
    except Blocked:
        if isinstance(plan, Schedule) and (error := deadlock(plan)) is not None:
            raise error from None
        why = f"the ranks of this plan for {schedule.name!r} wait for each other; prove() shows where"
        raise PlanError(why) from None
    spans, lanes = tuple(map(tuple, run.spans)), tuple(map(tuple, run.lanes)) if any(run.lanes) else ()
    messages = costs.messages_on(schedule.placement) if costs.message_ms else ()
    timeline = Timeline(schedule, spans, lanes=lanes, messages=messages)
    return replace(timeline, peak_activation=peaks(timeline, memory))


class Run:
    """The simulation of consecutive iterations of a plan.

    Attributes:
        spans, lanes: the passes of each rank in the last iteration, and its ops on other lanes.
    """

    def __init__(self, rows: Sequence[Iterable[Step]], schedule: Schedule, costs: PassCosts) -> None:
        self._rows, (self._costs, slices) = rows, of_schedule(costs, schedule)
        self._ranks = [lanes_of(rank, self._costs, slices) for rank in range(len(rows))]

    @property
    def free(self) -> list[float]:
        """The time in ms at which each rank has ended its passes; the next iteration starts then."""
        return [rank.free for rank in self._ranks]

    @free.setter
    def free(self, times: Iterable[float]) -> None:
        for rank, ms in zip(self._ranks, times, strict=True):
            rank.free = ms

    def iteration(self, given_ms: Mapping[Token, float]) -> None:
        """Run the plan once; ``given_ms`` has the tokens of the previous iteration and the times at which they hold.

        Raises:
            Blocked: when the ranks wait for each other.
        """
        made: Made = {token: (ms, None) for token, ms in given_ms.items()}
        costs, ranks = self._costs, self._ranks
        comm = costs.comm
        for lanes in ranks:
            lanes.begin()
        for rank, _, (op, after, waits, makes) in advance(self._rows, made):
            own = ranks[rank]
            # An op waits for results of its rank and of others; the rank itself waits only for those of others.
            ready = waited = own.free
            ends = own.ends
            for position in after:
                if ends[position] > ready:
                    ready = ends[position]
            for token in waits:
                ms, source = made[token]
                if source != rank:
                    if source is not None:
                        ms += comm(source, rank) + op.arrival_ms(costs, token)
                    if ms > waited:
                        waited = ms
                if ms > ready:
                    ready = ms
            own.run(op, ready, waited, makes, made)
        for lanes in ranks:
            lanes.end()
        self.spans, self.lanes = [lanes.spans for lanes in ranks], [lanes.others for lanes in ranks]

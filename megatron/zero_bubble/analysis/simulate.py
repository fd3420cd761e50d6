"""How long a plan takes and what it keeps, by the rules of the Zero Bubble paper (arXiv 2401.10241, section 2).

Every rank starts its ops in order. An op starts when the rank has come to it, its lane is free, and what it needs is
there; what another rank makes is there one transfer later, which occupies no lane. The rank goes on when the op ends,
or at once where the op is on another lane than the passes.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.zero_bubble.analysis.deadlock import deadlock
from megatron.zero_bubble.analysis.memory import peaks
from megatron.zero_bubble.analysis.steps import Blocked, Step, advance, steps, steps_of
from megatron.zero_bubble.analysis.timeline import LaneSpan, Span, Timeline
from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.errors import PlanError, UserError
from megatron.zero_bubble.ir import Compute, Plan, Schedule, Token
from megatron.zero_bubble.ir.ops import COMPUTE

__all__ = ["Span", "Timeline", "simulate"]


def simulate(plan: Plan | Schedule, costs: PassCosts, memory: PassMemory | None = None) -> Timeline:
    """The timeline of ``plan``, linear in its number of ops; without ``memory`` W keeps all that F added.

    Args:
        plan: a proved plan, or a schedule, whose values travel by themselves.

    Raises:
        PlanError: when the ranks of a plan wait for each other.
        ScheduleError: when the order deadlocks, naming rank and pass.
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
    except Blocked as blocked:
        if isinstance(plan, Schedule):
            raise deadlock(plan, blocked) from None
        raise PlanError(
            f"the ranks of this plan for {schedule.name!r} wait for each other; prove() shows where"
        ) from None
    spans, lanes = tuple(map(tuple, run.spans)), tuple(map(tuple, run.lanes))
    timeline = Timeline(schedule, spans, lanes=lanes if any(lanes) else ())
    return Timeline(schedule, spans, peaks(timeline, memory), timeline.lanes)


class Run:
    """Iterations of a plan on the clock, one after the other.

    Attributes:
        free: when every rank is done with its passes, in ms; the next iteration starts there, while the ops of other
            lanes may go on.
        spans, lanes: of the last iteration, for every rank its passes and its ops on other lanes.
    """

    def __init__(self, rows: list[list[Step]], schedule: Schedule, costs: PassCosts) -> None:
        self._steps = rows
        self._costs, self._num_slices = costs, schedule.num_slices
        self.free = [0.0] * len(rows)
        self._lane_free: list[dict[str, float]] = [{} for _ in rows]

    def iteration(self, given_ms: Mapping[Token, float]) -> None:
        """Run the plan once; ``given_ms`` are tokens of the iteration before, and when they came true.

        Raises:
            Blocked: when the ranks wait for each other.
        """
        costs, free, num_slices, comm = self._costs, self.free, self._num_slices, self._costs.comm
        lane_free = self._lane_free
        made: dict[object, tuple[float, int | None]] = {token: (ms, None) for token, ms in given_ms.items()}
        ends: list[list[float]] = [[] for _ in free]
        self.spans: list[list[Span]] = [[] for _ in free]
        self.lanes: list[list[LaneSpan]] = [[] for _ in free]
        for rank, _, (op, after, waits, makes) in advance(self._steps, tuple(given_ms)):
            start, own, lane = free[rank], ends[rank], op.lane or COMPUTE
            if lane != COMPUTE:
                start = max(start, lane_free[rank].get(lane, 0.0))
            for position in after:
                start = max(start, own[position])
            for token in waits:
                ms, source = made[token]
                if source != rank and source is not None:
                    ms += comm(source, rank)
                if ms > start:
                    start = ms
            end = start + op.duration_ms(costs, num_slices)
            if lane == COMPUTE:
                free[rank] = end
            else:
                lane_free[rank][lane] = end
            if isinstance(op, Compute):
                self.spans[rank].append(Span(op.work, start, end))
            elif op.lane is not None:
                self.lanes[rank].append(LaneSpan(lane, op, start, end))
            own.append(end)
            for token in makes:
                made[token] = end, rank

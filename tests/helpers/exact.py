"""Provably optimal schedules for small cases: a constraint model for OR-tools CP-SAT (extra ``exact``).

Tests compare the bounds of ``analysis.bounds`` with these optima.

Every pass is an interval, a rank runs one pass at a time, and microbatches keep their order
(``analysis.bounds.setting`` explains why that excludes no optimal schedule). Stored activations are intervals as well,
from the start of F to the end of B and from there to the end of W. Up to 4 ranks and 6 microbatches take seconds;
larger cases need a good ``hint``. Related formulations: the ILP of the Zero Bubble paper (arXiv 2401.10241, appendix
G) and CrossPipe's constraint program (arXiv 2507.00217).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Kind, Pass, Placement, Schedule

_TICKS = 1_000_000
"""Ticks in the sum of all passes. Durations are rounded down to ticks, so that the bound holds for the exact ones."""
_LARGEST_MS = 1e12
"""Largest sum of all passes for ticks of one millisecond; times ``_TICKS`` it is below the solver's largest integer."""


@dataclass(frozen=True)
class ExactSchedule:
    """A solution: ``schedule``, its ``cost_ms``, and the lower bound ``bound_ms`` on every schedule's cost.

    ``optimal`` is True if the solver reached ``bound_ms``. With the span as objective, reaching it can require a first
    pass that starts later than possible; ``cost_ms`` is ``simulate``'s, which starts every pass as early as possible.
    """

    schedule: Schedule
    cost_ms: float
    bound_ms: float
    optimal: bool


def solve(
    costs: PassCosts,
    memory: PassMemory,
    placement: Placement,
    num_microbatches: int,
    memory_limit: float | None = None,
    objective: Metric = "span",
    *,
    fused: bool = False,
    hint: Schedule | None = None,
    seconds: float = 60.0,
    workers: int = 1,
) -> ExactSchedule:
    """Find the shortest schedule within ``memory_limit`` (in the unit of ``memory``) in at most ``seconds``.

    ``hint`` is a schedule on the same placement to start the search from; it may exceed the limit.

    Raises:
        ValueError: if no schedule satisfies the limit, or none was found in time.
    """
    from ortools.sat.python import cp_model

    model = _Model(cp_model.CpModel(), costs, placement, num_microbatches, fused)
    model.one_pass_at_a_time()
    model.dependencies()
    if memory_limit is not None:
        model.keep_within(memory, memory_limit)
    model.minimize(objective)
    if hint is not None:
        model.start_from(hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model.cp)
    if status == cp_model.INFEASIBLE:
        raise ValueError(f"no schedule satisfies the memory limit {memory_limit}; raise it")
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ValueError(f"the exact solver found no schedule within {seconds} s; give a hint or more seconds")
    schedule = model.schedule(solver)
    timeline = simulate(schedule, costs, memory)
    cost = timeline.makespan_ms if objective == "makespan" else timeline.span_ms
    return ExactSchedule(schedule, cost, solver.best_objective_bound * model.tick, status == cp_model.OPTIMAL)


class _Model:
    """The constraint model; its variables are ``start`` and ``end`` of every pass, in ticks."""

    def __init__(self, cp: Any, costs: PassCosts, placement: Placement, m: int, fused: bool) -> None:
        self.cp, self.costs, self.placement, self.m = cp, costs, placement, m
        self.kinds = (Kind.F, Kind.BW) if fused else (Kind.F, Kind.B, Kind.W)
        stages = range(placement.num_stages)
        self.passes = [Pass(s, kind, j) for j in range(m) for kind in self.kinds for s in stages]
        hops = pairwise(placement.stage_to_rank)
        transfers = 2 * m * sum(max(costs.comm(a, b), costs.comm(b, a)) for a, b in hops)
        one_by_one = sum(map(costs.duration, self.passes)) + transfers
        exact = self._whole() and one_by_one <= _LARGEST_MS
        self.tick = 1.0 if exact else max(one_by_one, 1e-9) / _TICKS
        self.horizon = int(one_by_one / self.tick) + 1
        self.start: dict[Pass, Any] = {}
        self.end: dict[Pass, Any] = {}
        self.interval: dict[Pass, Any] = {}
        for p in self.passes:
            length = self.ticks(costs.duration(p))
            self.start[p] = cp.new_int_var(0, self.horizon, f"start {p}")
            self.end[p] = self.start[p] + length
            self.interval[p] = cp.new_fixed_size_interval_var(self.start[p], length, str(p))

    def _whole(self) -> bool:
        """Whether all durations are whole milliseconds, so that one tick can be one millisecond."""
        c = self.costs
        figures = (*c.forward_ms, *c.backward_ms, *c.wgrad_ms, c.comm_ms, *c.links.values())
        return all(ms == int(ms) for ms in figures)

    def ticks(self, ms: float) -> int:
        """Convert ``ms`` to ticks, rounded down."""
        return int(ms / self.tick)

    def on(self, rank: int) -> list[Pass]:
        """Return the passes of ``rank``."""
        return [p for p in self.passes if self.placement.stage_to_rank[p.stage] == rank]

    def one_pass_at_a_time(self) -> None:
        """Constrain each rank to one pass at a time."""
        for rank in range(self.placement.num_ranks):
            self.cp.add_no_overlap(self.interval[p] for p in self.on(rank))

    def dependencies(self) -> None:
        """Make each pass wait for its inputs and for the same pass of the previous microbatch."""
        unordered = Schedule("", self.placement, self.m, (tuple(self.passes),))
        ranks = self.placement.stage_to_rank
        for p in self.passes:
            for d in unordered.dependencies(p):
                transfer = self.ticks(self.costs.comm(ranks[d.stage], ranks[p.stage]))
                self.cp.add(self.start[p] >= self.end[d] + transfer)
            if p.microbatch:
                self.cp.add(self.start[p] >= self.end[Pass(p.stage, p.kind, p.microbatch - 1)])

    def keep_within(self, memory: PassMemory, limit: float) -> None:
        """Limit each rank's stored activations, counted in millionths of the limit."""
        for rank in range(self.placement.num_ranks):
            kept, sizes = [], []
            for p in self.on(rank):
                if p.kind is Kind.F:
                    continue
                first, size = (Kind.B, memory.wgrad) if p.kind is Kind.W else (Kind.F, memory.activation)
                since = Pass(p.stage, first, p.microbatch)
                begin = self.end[since] if p.kind is Kind.W else self.start[since]
                length = self.cp.new_int_var(0, self.horizon, f"{p} keeps")
                kept.append(self.cp.new_interval_var(begin, length, self.end[p], f"{p} frees"))
                sizes.append(round(size[p.stage] / limit * _TICKS))
            # The rounding error of each size is at most half a millionth.
            self.cp.add_cumulative(kept, sizes, _TICKS + len(sizes) // 2)

    def minimize(self, objective: Metric) -> None:
        """Minimize the largest span of any rank, or the makespan."""
        cost = self.cp.new_int_var(0, self.horizon, objective)
        for rank in range(self.placement.num_ranks):
            stages = self.placement.stages_of(rank)
            begin = self.start[Pass(stages[0], Kind.F, 0)] if objective == "span" else 0
            for stage in stages:
                self.cp.add(cost >= self.end[Pass(stage, self.kinds[-1], self.m - 1)] - begin)
        self.cp.minimize(cost)

    def start_from(self, hint: Schedule) -> None:
        """Start the search from the times of ``hint``; the k-th pass of each kind is taken as microbatch k's."""
        timeline = simulate(hint, self.costs)
        starts: dict[tuple[int, Kind], list[int]] = {}
        for row in timeline.spans:
            for span in row:
                p = span.pass_
                kinds = (Kind.B, Kind.W) if p.kind is Kind.BW and Kind.W in self.kinds else (p.kind,)
                for kind in kinds:
                    late = self.costs.backward_ms[p.stage] if len(kinds) > 1 and kind is Kind.W else 0.0
                    starts.setdefault((p.stage, kind), []).append(self.ticks(span.start_ms + late))
        for p in self.passes:
            times = sorted(starts.get((p.stage, p.kind), ()))
            if p.microbatch < len(times):
                self.cp.add_hint(self.start[p], times[p.microbatch])

    def schedule(self, solver: Any) -> Schedule:
        """Convert the solution to an order; dependencies order passes of zero length at the same time."""
        rank_of_kind = {kind: n for n, kind in enumerate(self.kinds)}

        def when(p: Pass) -> tuple[int, int, int, int, int]:
            along = p.stage if p.kind is Kind.F else -p.stage
            return solver.value(self.start[p]), solver.value(self.end[p]), p.microbatch, rank_of_kind[p.kind], along

        order = tuple(tuple(sorted(self.on(rank), key=when)) for rank in range(self.placement.num_ranks))
        return Schedule("exact", self.placement, self.m, order)

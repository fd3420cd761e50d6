"""Ranks that share a link to the host: plans for 1/N of its bandwidth hold, however their copies meet.

At run time the copies of two processes do not take turns: those under way in one direction at a time divide its
bandwidth. Planned for 1/N of it, no copy ends later than planned. Planned for all of it, passes wait.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, PassMemory, build, simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.ir import Compute, Op, Pass, Plan
from megatron.zero_bubble.core.ir.offload import Evict, Fetch, Reclaim, ReleaseDevice
from megatron.zero_bubble.core.plan.offload import offload
from megatron.zero_bubble.planning.offload import HostLimits, OffloadPlan, plan_offload

Case = tuple[Timeline, PassCosts, PassMemory]
_Lane = tuple[int, type[Op]]


class SharedLinks:
    """A run of a plan from event to event. Copies under way on a link in one direction divide its bandwidth equally.

    Attributes:
        now: the time in ms; in the end, the makespan.
    """

    def __init__(self, plan: Plan, costs: PassCosts, per_link: int) -> None:
        ranks = range(len(plan.ops))
        self._plan, self._costs = plan, costs
        on_links = [ranks[first : first + per_link] for first in ranks[::per_link]]
        self._links = [[(rank, direction) for rank in link] for link in on_links for direction in (Evict, Fetch)]
        self._places, self._busy = [0 for _ in ranks], [0.0 for _ in ranks]
        # The copies of a rank in a direction, in order, with the time left at full speed.
        self._copies: dict[_Lane, list[tuple[Op, float]]] = {lane: [] for link in self._links for lane in link}
        self._ended: dict[Pass | Op, float] = {}
        self.now = 0.0
        while any(place < len(row) for place, row in zip(self._places, plan.ops, strict=True)):
            for rank in ranks:
                while self._issues(rank):
                    pass
            self._wait()
        self.now = max(self._busy)

    def _issues(self, rank: int) -> bool:
        """Start the next op of a rank, if it can start now."""
        row, place = self._plan.ops[rank], self._places[rank]
        if place == len(row) or self._busy[rank] > self.now or self._ready(row[place], rank) > self.now:
            return False
        op = row[place]
        if isinstance(op, (Evict, Fetch)):
            self._copies[rank, type(op)].append((op, op.duration_ms(self._costs, self._plan.schedule.slices)))
        elif isinstance(op, Compute):
            self._ended[op.work] = self._busy[rank] = self.now + self._costs.duration(op.work)
        self._places[rank] += 1
        return True

    def _ready(self, op: Op, rank: int) -> float:
        """When that is there for which the op waits; infinity as long as this is open."""
        if isinstance(op, ReleaseDevice):
            return self._ended.get(Evict(op.forward), math.inf)
        if isinstance(op, Reclaim):
            return self._ended.get(Fetch(op.forward), math.inf)
        times = [0.0]
        if isinstance(op, Compute):
            for value in self._plan.schedule.flow.inputs(op.work):
                source = self._plan.schedule.placement.stage_to_rank[value.producer.stage]
                comm = self._costs.comm(source, rank) if source != rank else 0.0
                times.append(self._ended.get(value.producer, math.inf) + comm)
        return max(times)

    def _wait(self) -> None:
        """Let time pass until the next event."""
        under_way = [[lane for lane in link if self._copies[lane]] for link in self._links]
        sharing = {lane: len(link) for link in under_way for lane in link}
        rows = enumerate(self._plan.ops)
        events = [self._ready(row[self._places[rank]], rank) for rank, row in rows if self._places[rank] < len(row)]
        events += [*self._busy, *(self.now + self._copies[lane][0][1] * number for lane, number in sharing.items())]
        then = min(ms for ms in events if ms > self.now)
        for lane, number in sharing.items():
            op, left = self._copies[lane][0]
            left -= (then - self.now) / number
            if left <= 1e-9:
                self._ended[op] = then
                del self._copies[lane][0]
            else:
                self._copies[lane][0] = op, left
        self.now = then


def added(case: Case, plan: OffloadPlan, per_link: int) -> float:
    """How much longer than without offloading a plan takes on shared links, as a share."""
    before, costs, _ = case
    return SharedLinks(offload(Plan.bare(before.schedule), plan.moves), costs, per_link).now / before.makespan_ms - 1


def in_unit_time(name: str, k: float, num_ranks: int = 8, num_microbatches: int = 16) -> Case:
    """Passes of 1 ms per rank, where W needs 30% of the memory; k is for a link that is not shared."""
    schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    costs = PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0)
    costs = replace(costs, host_ms=tuple(1.5 * k * ms for ms in costs.forward_ms))
    memory = PassMemory.uniform(schedule.placement, 1.0, 0.3)
    return simulate(schedule, costs, memory), costs, memory


@settings(deadline=None, max_examples=12)
@given(
    st.sampled_from(["1f1b", "zb-h1", "zb-h2", "zb-v", "gis-h"]),
    st.floats(0.1, 1.2),
    st.integers(2, 6),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3]),
)
def test_plans_for_shared_links_delay_nothing(name: str, k: float, p: int, m: int, per_link: int) -> None:
    case = in_unit_time(name, k, p, m)
    plan = plan_offload(*case, host=HostLimits(ranks_per_link=per_link))
    assert added(case, plan, per_link) <= 1e-6


def test_on_links_of_their_own_ranks_run_as_simulated() -> None:
    """Also where copies delay passes."""
    case = in_unit_time("zb-v", 1.7, 4, 9)
    plan = plan_offload(*case, "all")
    assert plan.added_ms > 1
    assert added(case, plan, 1) == pytest.approx(plan.added_ms / case[0].makespan_ms)


@pytest.mark.parametrize(
    ("name", "k", "peak", "shared_peak", "delay"),
    [
        ("1f1b", 0.25, 2.0, 2.0, 0.0),
        ("1f1b", 0.5, 2.0, 4.0, 0.0),
        ("1f1b", 0.75, 3.0, 6.0, 0.02),
        ("zb-h2", 0.25, 5.6, 5.6, 0.0),
        ("zb-h2", 0.5, 5.6, 7.0, 0.109),
        ("zb-h2", 0.75, 6.6, 11.0, 0.186),
        ("zb-v", 0.25, 2.95, 2.95, 0.0),
        ("zb-v", 0.5, 2.95, 3.8, 0.126),
        ("zb-v", 0.75, 3.5, 5.5, 0.278),
    ],
)
def test_copies_at_full_speed_would_delay_passes(
    name: str, k: float, peak: float, shared_peak: float, delay: float
) -> None:
    """The figures of docs/offload.md."""
    case = in_unit_time(name, k)
    full, shared = plan_offload(*case), plan_offload(*case, host=HostLimits(ranks_per_link=2))
    assert max(full.device_peak) == pytest.approx(peak)
    assert max(shared.device_peak) == pytest.approx(shared_peak)
    assert added(case, full, 2) == pytest.approx(delay, abs=6e-4)
    assert added(case, shared, 2) == pytest.approx(0.0, abs=1e-9)

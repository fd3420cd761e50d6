"""A plan with offloading is executed as it was simulated, whether its copies are short or long."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from megatron.zero_bubble import PassCosts, PassMemory, build, simulate
from megatron.zero_bubble.core.analysis.timeline import LaneSpan, Span
from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.plan.offload import select_longest
from megatron.zero_bubble.engine.runtime.groups import Directions
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers.emulate.clock import VirtualClock
from tests.helpers.emulate.execute import execute
from tests.helpers.emulate.links import VirtualLinks
from tests.helpers.emulate.offload import virtual_offload
from tests.helpers.emulate.stages import VirtualStage
from tests.helpers.ranks import RankPool

Ran = tuple[list[Span], list[LaneSpan]]


def costs_of(plan: Plan, host_ms: float) -> PassCosts:
    placement = plan.schedule.placement
    return replace(PassCosts.uniform(placement, 5.0, 6.0, 4.0, 0.5), host_ms=(host_ms,) * placement.num_stages)


def run(rank: int, plan: Plan, costs: PassCosts) -> Ran:
    assert dist.group.WORLD is not None
    transport, clock = Transport(Directions.of(dist.group.WORLD), plan.channels), VirtualClock()
    stage = VirtualStage(plan.schedule, costs, clock)
    execute(plan, stage, VirtualLinks(transport, costs), more=virtual_offload(plan.schedule, costs, clock))
    transport.close()
    return clock.spans, clock.lanes


@pytest.mark.parametrize("host_ms", [2.0, 30.0])
@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v"])
def test_executed_as_planned(ranks: RankPool, name: str, host_ms: float) -> None:
    schedule = build(name, num_ranks=4, num_microbatches=8)
    plan = plan_of(schedule, Additions(moves=tuple(select_longest(schedule, 1.0))))
    costs, memory = costs_of(plan, host_ms), PassMemory.uniform(schedule.placement, 8.0, 2.0)
    planned = simulate(plan, costs, memory)
    rows: list[Ran] = ranks.run(4, run, plan, costs)
    for rank, (spans, lanes) in enumerate(rows):
        assert tuple(spans) == planned.spans[rank]
        assert tuple(lanes) == planned.lanes[rank]
    without = simulate(schedule, costs, memory)
    assert (planned.makespan_ms > without.makespan_ms) == (host_ms > 20), "passes wait only for copies that take long"
    assert planned.peak_activation[0] < without.peak_activation[0]

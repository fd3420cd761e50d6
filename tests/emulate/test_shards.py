"""A plan with sharded units is executed as it was simulated, whether its collectives are short or long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch.distributed as dist

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.core.analysis.timeline import LaneSpan, Span
from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.plan.shard import Sharding
from megatron.zero_bubble.engine.runtime.groups import Directions
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers.emulate.clock import VirtualClock
from tests.helpers.emulate.execute import execute
from tests.helpers.emulate.links import VirtualLinks
from tests.helpers.emulate.shards import virtual_shards
from tests.helpers.emulate.stages import VirtualStage
from tests.helpers.ranks import RankPool

Ran = tuple[list[Span], list[LaneSpan]]


def run(rank: int, plan: Plan, costs: PassCosts) -> Ran:
    assert dist.group.WORLD is not None
    transport, clock = Transport(Directions.of(dist.group.WORLD), plan.channels), VirtualClock()
    stage = VirtualStage(plan.schedule, costs, clock)
    execute(plan, stage, VirtualLinks(transport, costs), more=virtual_shards(plan.schedule, costs, clock))
    transport.close()
    return clock.spans, clock.lanes


@pytest.mark.parametrize("gather_ms", [1.0, 40.0])
@pytest.mark.parametrize("name", ["zero-pp", "breadth-first", "interleaved-1f1b"])
def test_executed_as_planned(ranks: RankPool, name: str, gather_ms: float) -> None:
    schedule = build(name, num_ranks=4, num_microbatches=8)
    costs = PassCosts.uniform(schedule.placement, 5.0, 6.0, 4.0, 0.5)
    stages = schedule.num_stages
    costs = replace(costs, gather_ms=(gather_ms,) * stages, reduce_ms=(1.5 * gather_ms,) * stages)
    plan = plan_of(schedule, Additions(sharding=Sharding(4)))
    planned = simulate(plan, costs)
    rows: list[Ran] = ranks.run(4, run, plan, costs)
    for rank, (spans, lanes) in enumerate(rows):
        assert tuple(spans) == planned.spans[rank]
        assert without_issue(lanes) == without_issue(planned.lanes[rank])


def without_issue(lanes: Sequence[LaneSpan]) -> list[LaneSpan]:
    """The spans without the times at which their ops were issued: virtual ranks do not wait where they settle."""
    return [span._replace(issued_ms=None) for span in lanes]

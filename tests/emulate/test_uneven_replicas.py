"""Replicas with different numbers of microbatches on virtual clocks end earlier than with equal numbers."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble import LengthCost, balance, build
from megatron.zero_bubble.core.costs.lengths import Load
from megatron.zero_bubble.core.plan import plan_of
from megatron.zero_bubble.engine.runtime.groups import Directions
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers.emulate.clock import VirtualClock
from tests.helpers.emulate.execute import execute
from tests.helpers.emulate.links import VirtualLinks
from tests.helpers.emulate.stages import VirtualStage
from tests.helpers.ranks import RankPool
from tests.planning.test_balance import cost_for, lognormal, makespan

RANKS = 2


Replicas = list[list[list[int]]]
"""The lengths of the samples of each microbatch of each replica."""


def iteration_ms(_rank: int, name: str, assignments: list[Replicas], cost: LengthCost) -> list[float]:
    """Run one iteration per assignment; return the time of the reduction of gradients, when all replicas have ended."""
    replica = dist.get_rank() // RANKS
    pipelines = [dist.new_group(range(first, first + RANKS)) for first in range(0, dist.get_world_size(), RANKS)]
    transport = Transport(Directions.of(pipelines[replica]), [])
    ends = []
    for replicas in assignments:
        own = replicas[replica]
        schedule = build(name, num_ranks=RANKS, num_microbatches=len(own))
        costs = cost.passes(schedule.placement, tuple(map(Load.of, own)))
        plan, clock = plan_of(schedule), VirtualClock()
        transport.open(plan.channels)
        execute(plan, VirtualStage(schedule, costs, clock), VirtualLinks(transport, costs))
        end = torch.tensor(clock.now_ms, dtype=torch.float64)
        dist.all_reduce(end, dist.ReduceOp.MAX)
        ends.append(float(end))
    return ends


full = pytest.mark.full
ROWS = (
    ("zb-h1", 16, 8192),
    ("zb-v", 8, 8192),
    pytest.param("zb-h1", 16, 65536, marks=full),
    pytest.param("zb-h1", 8, 8192, marks=full),
    pytest.param("zb-v", 16, 65536, marks=full),
    pytest.param("1f1b", 16, 65536, marks=full),
    pytest.param("1f1b", 16, 8192, marks=full),
)


@pytest.mark.parametrize(("name", "each", "longest"), ROWS)
def test_balanced_replicas_end_earlier(ranks: RankPool, name: str, each: int, longest: int) -> None:
    """At least 1.3 times, unless no rank has a bubble, and then they are within 5 % of equal work."""
    generator, cost = random.Random(1), cost_for(longest)
    assignments: list[Replicas] = []
    work = 0.0
    for _ in range(6):
        lengths = lognormal(2 * each, longest, generator)
        own = balance(lengths, 2, RANKS, longest, name, cost)
        assignments.append([[[tokens] for tokens in lengths[replica::2]] for replica in range(2)])
        assignments.append([[[lengths[sample] for sample in part] for part in replica] for replica in own])
        work += sum(map(cost.sample, lengths)) / 2
    times = ranks.run(2 * RANKS, iteration_ms, name, assignments, cost, timeout=60)
    for replicas, ms in zip(assignments, times[0], strict=True):
        assert ms == pytest.approx(max(makespan(name, RANKS, own, cost) for own in replicas)), "as simulated"
    equal, balanced = times[0][0::2], times[0][1::2]
    assert all(after <= before * 1.001 for before, after in zip(equal, balanced, strict=True)), (equal, balanced)
    assert sum(equal) >= 1.3 * sum(balanced) or sum(balanced) <= 1.05 * work, sum(equal) / sum(balanced)

"""Replicas with different numbers of microbatches on virtual clocks end earlier than with equal numbers."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble import PassCosts, build
from megatron.zero_bubble.costs.lengths import LengthCost, Shape
from megatron.zero_bubble.plan import lower_training
from megatron.zero_bubble.planning.balance import balance
from megatron.zero_bubble.runtime.groups import Directions
from megatron.zero_bubble.runtime.transport import Transport
from tests.helpers.emulate.clock import VirtualClock
from tests.helpers.emulate.execute import execute
from tests.helpers.emulate.links import VirtualLinks
from tests.helpers.emulate.stages import VirtualStage
from tests.helpers.lengths import ShapedCosts
from tests.helpers.ranks import RankPool
from tests.planning.test_balance import lognormal, makespan_ms

HIDDEN, RANKS = 2048, 2


def iteration_ms(_rank: int, name: str, assignments: list[list[list[int]]], longest: int) -> list[float]:
    """Run one iteration per assignment; return the time of the reduction of gradients, when all replicas have ended.

    Args:
        assignments: for each iteration and replica, the lengths of its microbatches of one sample.
    """
    replica = dist.get_rank() // RANKS
    pipelines = [dist.new_group(range(first, first + RANKS)) for first in range(0, dist.get_world_size(), RANKS)]
    transport = Transport(Directions.of(pipelines[replica]), [])
    attention, ends = longest / (12 * HIDDEN + longest), []
    for replicas in assignments:
        own = replicas[replica]
        schedule = build(name, num_ranks=RANKS, num_microbatches=len(own))
        costs = PassCosts.uniform(
            schedule.placement, 10.0, 10.0 * (1 + attention), 10.0 * (1 - attention), 0.0, attention
        )
        shaped = ShapedCosts(**vars(costs), sequence=longest, shapes=tuple(Shape(1, tokens) for tokens in own))
        plan, clock = lower_training(schedule), VirtualClock()
        transport.open(plan.channels)
        execute(plan, VirtualStage(schedule, shaped, clock), VirtualLinks(transport, shaped))
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
    generator, cost = random.Random(1), LengthCost.of_share(longest / (12 * HIDDEN + longest), longest)
    assignments, work = [], 0.0
    for _ in range(6):
        lengths = lognormal(2 * each, longest, generator)
        own = balance(lengths, 2, RANKS, cost, longest)
        assignments.append([lengths[replica::2] for replica in range(2)])
        assignments.append([[lengths[sample] for (sample,) in microbatches] for microbatches in own])
        work += 30.0 * sum(map(cost.sample, lengths)) / 2
    times = ranks.run(2 * RANKS, iteration_ms, name, assignments, longest, timeout=60)
    for replicas, ms in zip(assignments, times[0], strict=True):
        assert ms == pytest.approx(max(makespan_ms(name, RANKS, own, longest) for own in replicas)), "as simulated"
    equal, balanced = times[0][0::2], times[0][1::2]
    assert all(after <= before * 1.001 for before, after in zip(equal, balanced, strict=True)), (equal, balanced)
    assert sum(equal) >= 1.3 * sum(balanced) or sum(balanced) <= 1.05 * work, sum(equal) / sum(balanced)

"""The real executor and the real transport, on virtual clocks: what ran is what was planned, to 0.01 ms."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron.zero_bubble import PassCosts, Placement, Schedule
from megatron.zero_bubble.runtime.emulate import virtual_cases, virtual_deviation_ms
from megatron.zero_bubble.runtime.p2p import Transport
from tests.helpers.gpipe import PLACEMENTS, gpipe
from tests.helpers.ranks import RankPool

Case = tuple[Schedule, PassCosts]


def deviations(_rank: int, cases: list[Case]) -> list[tuple[float, str]]:
    """Run every case on this rank; returns how far it was from its plan, and where."""
    assert dist.group.WORLD is not None
    transport = Transport(dist.group.WORLD, [])
    results = [virtual_deviation_ms(schedule, costs, transport) for schedule, costs in cases]
    assert transport.num_in_flight == 0
    return results


def assert_executed_as_planned(ranks: RankPool, cases: list[Case]) -> None:
    for rank, row in enumerate(ranks.run(cases[0][0].num_ranks, deviations, cases)):
        for (schedule, costs), (deviation_ms, where) in zip(cases, row, strict=True):
            assert deviation_ms <= 0.01, (schedule.name, schedule.num_microbatches, costs, rank, where)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_every_schedule_runs_as_planned(ranks: RankPool, num_ranks: int) -> None:
    assert_executed_as_planned(ranks, list(virtual_cases(num_ranks)))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: str(p.stage_to_rank))
@pytest.mark.parametrize("num_slices", [1, 2])
def test_several_chunks_and_slices_run_as_planned(ranks: RankPool, placement: Placement, num_slices: int) -> None:
    """The turn of a V hands its tensors over on the rank; slices of a sequence are passes of their own."""
    schedule = gpipe(placement, 3, num_slices)
    stages = range(schedule.num_stages)
    costs = PassCosts(
        tuple(3.0 + s for s in stages), tuple(5.0 - s / 2 for s in stages), tuple(2.0 for _ in stages), 0.5
    )
    assert_executed_as_planned(ranks, [(schedule, costs)])

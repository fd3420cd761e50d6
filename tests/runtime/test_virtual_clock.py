"""The real executor and the real transport, on virtual clocks: what ran is what was planned, to 0.01 ms."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble import SCHEDULES, PassCosts, Placement, Schedule, build, simulate
from megatron.zero_bubble.plan import Message, Send, lower
from megatron.zero_bubble.runtime.emulate import VirtualClock, VirtualStage
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.p2p import Transport
from tests.helpers.gpipe import PLACEMENTS, gpipe
from tests.helpers.ranks import RankPool

Spans = list[tuple[str, float, float]]

COST_RATIOS = {"equal": (10.0, 10.0, 10.0, 0.0), "paper": (18.522, 18.086, 9.337, 0.601), "slow link": (5, 9, 3, 4)}


def execute_on_virtual_clocks(rank: int, cases: list[tuple[Schedule, PassCosts]]) -> list[Spans]:
    """Run every case on this rank; returns its passes with start and end."""
    group = dist.group.WORLD
    assert group is not None
    transport = Transport(group, [])
    executed = []
    for schedule, costs in cases:
        plan = lower(schedule)
        transport.open({op.message.channel for row in plan.ops for op in row if isinstance(op, Send)})
        clock = VirtualClock()
        stages = {s: VirtualStage(schedule, costs, clock, 1024) for s in schedule.placement.stages_of(rank)}

        def new_buffer(_message: Message) -> torch.Tensor:
            return torch.empty(1024, dtype=torch.float64)

        Executor(plan, rank, stages, transport, new_buffer).run()
        assert transport.num_in_flight == 0
        executed.append([(str(span.pass_), span.start_ms, span.end_ms) for span in clock.spans])
    return executed


def assert_executed_as_planned(ranks: RankPool, cases: list[tuple[Schedule, PassCosts]]) -> None:
    num_ranks = cases[0][0].num_ranks
    executed = ranks.run(num_ranks, execute_on_virtual_clocks, cases)
    for index, (schedule, costs) in enumerate(cases):
        planned = simulate(schedule, costs)
        for rank in range(num_ranks):
            assert [name for name, _, _ in executed[rank][index]] == [str(p) for p in schedule.order[rank]]
            for (name, *times), (_, *expected) in zip(executed[rank][index], planned.spans[rank], strict=True):
                assert times == pytest.approx(expected, abs=0.01), (schedule.name, rank, name)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_every_schedule_runs_as_planned(ranks: RankPool, num_ranks: int) -> None:
    cases = []
    for name in SCHEDULES:
        for num_microbatches in (1, num_ranks, 3 * num_ranks):
            for ratio in COST_RATIOS.values():
                schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
                cases.append((schedule, PassCosts.uniform(schedule.placement, *ratio)))
    assert_executed_as_planned(ranks, cases)


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

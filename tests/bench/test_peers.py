"""Tests of the benches' translation of torch's schedules."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from bench.peers import schedule_of
from megatron.zero_bubble import Placement, ScheduleError, build
from tests.helpers.ranks import RankPool


def orders(rank: int, num_microbatches: int) -> list[tuple[tuple[str, ...], ...]]:
    """Return torch's zb1p and ZBV for this world size in our notation."""
    world = torch.distributed.get_world_size()

    def stages(placement: Placement) -> list[PipelineStage]:
        cpu = torch.device("cpu")
        own = placement.stages_of(rank)
        return [PipelineStage(torch.nn.Identity(), stage, placement.num_stages, cpu) for stage in own]

    results = []
    for make, placement in (
        (ScheduleInterleavedZeroBubble, Placement.linear(world)),
        (ScheduleZBVZeroBubble, Placement.vee(world)),
    ):
        schedule = make(stages(placement), num_microbatches)
        results.append(schedule_of("torch", schedule.pipeline_order, placement, num_microbatches).to_text())
    return results


def test_torch_orders_are_translated_to_valid_schedules(ranks: RankPool) -> None:
    zb1p, zbv = ranks.run(2, orders, 4)[0]
    assert zb1p == build("zb-h1", num_ranks=2, num_microbatches=4).to_text()
    assert zbv[0][:8] == ("0F0", "0F1", "0F2", "3F0", "3B0", "3W0", "3F1", "3B1")


class Action:
    """Imitates an entry of torch's ``pipeline_order``."""

    def __init__(self, stage: int, kind: str, microbatch: int | None) -> None:
        self.stage_index = stage
        self.computation_type = type("Kind", (), {"value": kind})
        self.microbatch_index = microbatch


def test_letters_are_translated_and_other_actions_omitted() -> None:
    order = {0: [None, Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "I", 1), Action(0, "W", 1)]}
    order[0].append(Action(0, "REDUCE_GRAD", None))
    assert schedule_of("torch", order, Placement.linear(1), 2).to_text() == (("0F0", "0F1", "0BW0", "0B1", "0W1"),)


def test_invalid_torch_order_is_rejected() -> None:
    with pytest.raises(ScheduleError, match="0F1"):
        schedule_of("torch", {0: [Action(0, "F", 1), Action(0, "B", 0)]}, Placement.linear(1), 1)

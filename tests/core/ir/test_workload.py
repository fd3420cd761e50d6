"""What schedules put in order, and how many messages that takes."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.core.ir.ops import Send
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.plan import plan_of
from megatron.zero_bubble.core.schedules import build


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b", "seq-zb-h1"])
def test_its_messages_are_those_of_a_plan(name: str) -> None:
    schedule = build(name, num_ranks=4, num_microbatches=8)
    work = Workload.of(schedule)
    assert work.num_messages == sum(isinstance(op, Send) for row in plan_of(schedule).ops for op in row)
    assert work.is_whole is (schedule.num_slices == 1)
    assert work.figures == {"num_slices": schedule.num_slices, "vocabulary": None}


@pytest.mark.parametrize(("name", "hops"), [("1f1b", 3), ("interleaved-1f1b", 7), ("zb-v", 6)])
def test_what_crosses_between_ranks_may_be_wider_behind_a_stage(name: str, hops: int) -> None:
    schedule = build(name, num_ranks=4, num_microbatches=8)
    work, widths = Workload.of(schedule), [1.0] * schedule.num_stages
    assert work.crossing(widths) == work.crossings == 2 * 8 * hops
    widths[2] = 3.0
    assert work.crossing(widths) == 2 * 8 * (hops + 2)

"""Host memory is taken in few blocks, although nobody knows how much forwards move before they have run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.zero_bubble import build
from megatron.zero_bubble.core.ir import Compute
from megatron.zero_bubble.core.ir.offload import OFFLOAD_OPS, Evict, Fetch, Reclaim, ReleaseDevice
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.plan.offload import select_longest
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.platforms.host import HostMemory
from megatron.zero_bubble.engine.runtime.offload import Offloader
from megatron.zero_bubble.engine.runtime.saved import SavedTensors
from tests.engine.runtime.test_offload import SIZE


def run(offloader: Offloader, saved: SavedTensors, row: Any) -> None:
    """Run what a row moves; the forwards of stage s save s + 1 tensors."""
    by_op, held = offloader.handlers(None), {}
    offloader.expect(row)
    with offloader.iteration():
        for op in row:
            if isinstance(op, Compute) and op.work.kind.value == "F":
                tensors = [torch.ones(SIZE) for _ in range(op.work.stage + 1)]
                held[op.work] = saved.around(lambda _op, _inputs, own=tensors: [*map(saved.pack, own)], [])(op, ())
                del tensors
            elif isinstance(op, Evict):
                held[op.forward] = held[op.forward], by_op[Evict](op, ((None, None),))[0]
            elif isinstance(op, ReleaseDevice):
                packed, leaving = held[op.forward]
                held[op.forward] = packed, by_op[ReleaseDevice](op, (leaving.wait("release"),))[0]
            elif isinstance(op, Fetch):
                packed, on_host = held[op.forward]
                held[op.forward] = packed, by_op[Fetch](op, (on_host,))[0]
            elif isinstance(op, Reclaim):
                by_op[Reclaim](op, (held.pop(op.forward)[1].wait("reclaim"),))


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b"])
def test_one_block_per_stage_of_together_the_planned_peak(name: str) -> None:
    schedule = build(name, num_ranks=4, num_microbatches=12)
    plan = plan_of(schedule, Additions(moves=tuple(select_longest(schedule, 1.0))))
    saved, host = SavedTensors(), select("cpu").host_memory()
    offloader = Offloader(saved, host, *(select("cpu").lane() for _ in range(2)))
    row, stages = plan.ops[0], schedule.placement.stages_of(0)
    assert any(isinstance(op, OFFLOAD_OPS) for op in row)
    for _ in range(2):
        run(offloader, saved, row)
    blocks = [block.numel() for block in host._blocks]
    assert len(blocks) <= len(stages)
    assert sum(blocks) == host.peak > blocks[0] // 2
    assert offloader.close()


def test_no_more_than_the_limit_is_reserved() -> None:
    host: HostMemory = select("cpu").host_memory(1000)
    host.reserve(5000)
    assert [block.numel() for block in host._blocks] == [1024]
    host.reserve(700)
    assert len(host._blocks) == 1
    host.close()

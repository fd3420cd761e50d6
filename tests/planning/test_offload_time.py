"""Planning what moves takes at most a second of CPU time for 32 ranks and 256 microbatches."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, build
from megatron.zero_bubble.core.ir.garbage import without_gc
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.planning.offload import plan_offload


@pytest.mark.full
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b", "gis", "gis-h", "pipe-offload"])
@pytest.mark.parametrize(("k", "limit"), [(0.5, None), (1.2, None), (0.8, 0.6)])
def test_planning_takes_a_second_at_most(name: str, k: float, limit: float | None) -> None:
    """``limit`` is relative to the peak without offloading."""
    with without_gc():
        started = time.process_time()
        schedule = build(name, num_ranks=32, num_microbatches=256)
        costs = PassCosts.uniform(schedule.placement, 2.0, 2.0, 2.0)
        costs = replace(costs, host_ms=tuple(1.5 * k * ms for ms in costs.forward_ms))
        memory = PassMemory.uniform(schedule.placement, 1.0, 0.3)
        before = timeline_of(schedule, costs, memory)
        most = None if limit is None else limit * max(before.peak_activation)
        plan = plan_offload(before, costs, memory, limit=most)
        seconds = time.process_time() - started
    assert plan.moves and seconds <= 1.0

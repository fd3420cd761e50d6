"""What the runtime adds to passes and messages, counted in calls: as little for slices as for whole sequences."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megatron.zero_bubble import PassCosts, build
from megatron.zero_bubble.core.plan import lower
from megatron.zero_bubble.engine.runtime.groups import Directions
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers.emulate.execute import execute
from tests.helpers.emulate.stages import SleepingStage
from tests.helpers.ranks import RankPool

MOST_CALLS_PER_OP = 5.5
"""Python functions per op of a plan that ran before. It was 26 with registers that every iteration allocated again."""


class _Counter(TorchFunctionMode):
    """Counts the calls of torch that function modes see; the CPU platform's mode takes longer than such a call."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def overhead(_rank: int, name: str, num_slices: int | None) -> tuple[float, int]:
    """The Python functions per op, and the torch calls, of an iteration of a plan that ran once before."""
    assert dist.group.WORLD is not None
    schedule = build(name, num_ranks=2, num_microbatches=8, num_slices=num_slices)
    plan = lower(schedule)
    transport = Transport(Directions.of(dist.group.WORLD), plan.channels)
    stage = SleepingStage(schedule, PassCosts.uniform(schedule.placement, 0.0, 0.0, 0.0), (16, 1, 8))
    execute(plan, stage, transport)
    calls = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with _Counter() as counter:
        execute(plan, stage, transport)
    sys.setprofile(profile)
    try:
        execute(plan, stage, transport)
    finally:
        sys.setprofile(None)
    transport.close()
    return calls / len(plan.ops[transport.rank]), counter.count


@pytest.mark.parametrize(("name", "num_slices"), [("zb-h1", None), ("seq-1f1b", 4), ("seq-zb-h1", 4)])
def test_ops_cost_few_calls(ranks: RankPool, name: str, num_slices: int | None) -> None:
    for calls_per_op, torch_calls in ranks.run(2, overhead, name, num_slices):
        assert calls_per_op <= MOST_CALLS_PER_OP
        assert torch_calls == 0, "messages go around function modes"

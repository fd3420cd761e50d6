"""Tests of plans of ``zb-auto`` that the hardware queues of a job refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.engine.runtime.observer import IterationStart, observed
from megatron.zero_bubble.planning.setup import Searched, Setup
from megatron.zero_bubble.planning.worker import Request
from tests.helpers.ranks import RankPool

GIB = float(2**30)


def schedules_run_with_queues(rank: int, environment: dict[str, str]) -> tuple[list[str], list[str]]:
    """As ``schedules_run`` on a V, as if over NCCL; the plan needs several hardware queues."""
    from megatron.zero_bubble.engine.runtime import backends
    from megatron.zero_bubble.integration.adapter import auto, measured

    flat = build("breadth-first", num_ranks=2, num_microbatches=8)
    said: list[str] = []
    names: list[str] = []
    asked: list[Request] = []

    class Planner:
        limit = None

        def __init__(self, request: Request) -> None:
            asked.append(request)

        def finished(self) -> bool:
            return True

        def result(self) -> tuple[Any, str]:
            return flat, "switched"

    def trace(*_: Any) -> Any:
        ms = (1.0,) * 4
        return SimpleNamespace(timeline=simulate(schedule.make(2, 8), PassCosts(ms, ms, ms)))

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        if (own := environment.get(f"RANK_{rank}")) is not None:
            patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", own)
        patch.setattr(backends, "is_nccl", lambda backend: True)
        patch.setattr(auto, "Planner", Planner)
        patch.setattr(measured, "gather_trace", trace)
        passes: Any = SimpleNamespace(start=lambda group: None, stop=lambda: None)
        memory: Any = SimpleNamespace(gather=lambda group: PassMemory((GIB,) * 4, (GIB,) * 4))
        options = auto.AutoOptions(Setup(Searched("loop")), warm_up=0, measured=1)
        schedule = auto.AutoSchedule(options, memory, said.append)
        observer = measured.Measured(passes, [schedule])
        for _ in range(4):
            with observed(observer, IterationStart(torch.distributed.group.WORLD, 8)):
                names.append(schedule.make(2, 8).name)
    assert all(request.runs.queues is not None for request in asked)
    return names, said


@pytest.mark.parametrize(
    ("environment", "last"),
    [
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "breadth-first"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, ""),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, ""),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32", "RANK_1": "1"}, ""),
    ],
)
def test_a_plan_that_cannot_run_is_not_adopted(ranks: RankPool, environment: dict[str, str], last: str) -> None:
    """Also if only another rank could not run it; the job goes on with what it began with."""
    results = ranks.run(2, schedules_run_with_queues, environment)
    said = " ".join(results[0][1])
    for names, _ in results:
        assert names[-1] == (last or names[0])
    assert ("no plan, the schedule stays as it is: " in said) is (not last)
    if not last and "RANK_1" not in environment:
        assert "schedule 'breadth-first' needs several hardware queues per GPU" in said and "\n" not in said

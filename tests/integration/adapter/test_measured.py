"""Planners that ask for the same iteration get one recording of it, and measure iterations of one size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.engine.runtime.observer import IterationStart, observed
from megatron.zero_bubble.integration.adapter import measured
from megatron.zero_bubble.integration.adapter.measured import Measured, Replanner


class Late(Replanner):
    """Asks for all iterations after ``warm_up``, and notes the sizes of each measurement."""

    def __init__(self, warm_up: int, count: int) -> None:
        super().__init__(count)
        self._warm_up = warm_up
        self.found: list[tuple[int, list[int]]] = []

    def begin(self, start: IterationStart) -> bool:
        return self.iteration >= self._warm_up

    def evaluate(self, timelines: list[Timeline], start: IterationStart) -> None:
        self.found.append((self.iteration, [timeline.schedule.num_microbatches for timeline in timelines]))


@pytest.mark.parametrize(
    ("sizes", "first", "second"),
    [
        ([4, 4, 4, 4, 4], [(2, [4, 4]), (4, [4, 4])], [(4, [4, 4, 4])]),
        ([4, 4, 4, 6, 6], [(2, [4, 4]), (4, [6, 6])], []),
        ([4, 0, 4, 4, 4, 4], [(2, [4, 4]), (4, [4, 4])], [(4, [4, 4, 4])]),
    ],
    ids=["one size", "the batch grows", "an iteration fails"],
)
def test_iterations_are_recorded_once(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], first: list[Any], second: list[Any]
) -> None:
    calls: list[str] = []
    passes: Any = SimpleNamespace(start=lambda _: calls.append("start"), stop=lambda: calls.append("stop"))
    now, group = 0, SimpleNamespace()

    def trace(*_: Any) -> Any:
        schedule = build("zb-h1", num_ranks=2, num_microbatches=now)
        return SimpleNamespace(timeline=simulate(schedule, PassCosts((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))))

    monkeypatch.setattr(measured, "gather_trace", trace)
    planners = Late(1, 2), Late(2, 3)
    observer = Measured(passes, planners)
    for now in sizes:
        try:
            with observed(observer, IterationStart(group, now)):  # type: ignore[arg-type]
                assert now, "the iteration fails"
        except AssertionError:
            continue
    assert [planner.found for planner in planners] == [first, second]
    recorded = len(sizes) - 1
    assert calls.count("start") == recorded and calls.count("stop") == recorded - sizes.count(0)

"""Tests of the steps on several ranks: bubbles next to predictions, and bandwidth by CTAs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gpu_day import bubbles, nccl_bandwidth
from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.analysis.timeline import Span, Timeline
from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.schedules import build


def timeline(name: str, wait_ms: float = 0.0) -> Timeline:
    """A run of a schedule on two ranks, in which the second waits before its last pass."""
    schedule = build(name, num_ranks=2, num_microbatches=4)
    ran = simulate(schedule, PassCosts.uniform(schedule.placement, 2.0, 2.0, 2.0))
    *others, last = ran.spans[1]
    late = Span(last.pass_, last.start_ms + wait_ms, last.end_ms + wait_ms)
    return replace(ran, spans=(ran.spans[0], (*others, late)))


def test_run_as_planned_has_the_predicted_bubble() -> None:
    row = bubbles.compared("zb-h1", [timeline("zb-h1")] * 3)
    assert row["measured"] == pytest.approx(row["predicted"])
    assert row["forward_ms"] == pytest.approx([2.0, 2.0]) and row["wgrad_ms"] == pytest.approx([2.0, 2.0])


def test_wait_is_in_the_measured_bubble_only() -> None:
    usual, late = (bubbles.compared("zb-h1", [timeline("zb-h1", ms)] * 3) for ms in (0.0, 6.0))
    assert late["measured"]["ms"] == pytest.approx(usual["measured"]["ms"] + 6.0)
    assert late["measured"]["bubble"] > usual["measured"]["bubble"] + 0.1
    assert late["predicted"] == pytest.approx(usual["predicted"])


def test_passes_without_time_fail_the_step() -> None:
    ran = timeline("1f1b")
    stopped = replace(ran, spans=tuple(tuple(Span(p, start, start) for p, start, _ in row) for row in ran.spans))
    with pytest.raises(RuntimeError, match="1f1b needs a time for F and B of every stage"):
        bubbles.compared("1f1b", [stopped])


def test_fewest_ctas_that_are_fast_enough() -> None:
    speeds = {1: 20.0, 2: 46.0, 4: 50.0, 8: 48.0}
    rows = [{"ctas": ctas, "gb_per_s": speed, "slowdown": ctas / 100} for ctas, speed in speeds.items()]
    assert nccl_bandwidth.figures(rows) == {
        "best_ctas": 4,
        "best_gb_per_s": 50.0,
        "enough_ctas": 2,
        "enough_gb_per_s": 46.0,
        "slowdown": 0.02,
    }


class Done:
    def wait(self) -> None:
        pass


@pytest.mark.parametrize("lost", [0, 1])
def test_message_that_does_not_arrive_is_seen(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_bandwidth.dist, "get_rank", lambda: 1)
    message = torch.zeros(4)

    def receive() -> Any:
        message[lost:] = 1.0
        return Done()

    assert nccl_bandwidth._arrives(receive, message) is (lost == 0)

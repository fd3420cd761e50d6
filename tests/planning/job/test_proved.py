"""Tests of the proofs for all numbers of microbatches of a job, before it trains."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.planning.feasibility import ONE_QUEUE, Feasibility
from megatron.zero_bubble.planning.job.arguments.checks import check
from megatron.zero_bubble.planning.job.arguments.parser import parse
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.proved import check_counts
from pretrain import run
from tests.helpers.parity import BASE_FLAGS, Layout


def test_a_later_number_of_microbatches_is_refused() -> None:
    """On one hardware queue, this schedule runs few microbatches, and not many."""
    config = ZeroBubbleConfig(schedule="breadth-first")
    source, runs = config.sources()(4), Feasibility(ONE_QUEUE)
    plans = check_counts(config, source, 4, [4, 8], runs)
    assert {count: plan.schedule for count, plan in plans.items()} == {count: source.make(count) for count in (4, 8)}
    with pytest.raises(PlanError) as caught:
        check_counts(config, source, 4, [4, 8, 16], runs)
    assert str(caught.value).startswith("with 16 microbatches, schedule 'breadth-first' needs several hardware queues")
    assert "set it to 32" in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "count", "is_refused"), [("nccl", 16, True), ("nccl", 8, False), ("gloo", 16, False)]
)
def test_our_loop_refuses_a_ramp_before_it_trains(
    monkeypatch: pytest.MonkeyPatch, backend: str, count: int, is_refused: bool
) -> None:
    """A ramp from 4 microbatches in steps of 4."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    flags = [*BASE_FLAGS.split(), *Layout(4, num_layers=8).flags(count).split()]
    unit = str(int(flags[flags.index("--global-batch-size") + 1]) * 4 // count)
    flags += ["--rampup-batch-size", unit, unit, "8", "--zero-bubble-schedule", "breadth-first"]
    args = parse(flags)
    check(args, 4)
    refused = pytest.raises(PlanError, match="with 12 microbatches, schedule 'breadth-first' needs several hardware")
    with refused if is_refused else nullcontext():
        run._check_plans(args, backend)

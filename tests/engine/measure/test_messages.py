"""The time of a message, from the gaps between recorded passes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.core.analysis.timeline import LaneSpan, Span, Timeline
from megatron.zero_bubble.core.ir.ops import COMPUTE
from megatron.zero_bubble.engine.measure.gather import median_costs
from megatron.zero_bubble.engine.measure.messages import measured_message_ms

NAMES = ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "seq-zb-h1")


def recorded(name: str, message_ms: float, host_ms: float = 0.0, noise_ms: float = 0.0) -> tuple[Timeline, PassCosts]:
    """What a recorder sees of a run: only the passes themselves, each with a gap of the host before it."""
    schedule = build(name, num_ranks=4, num_microbatches=12)
    costs = replace(PassCosts.uniform(schedule.placement, 5.0, 6.0, 4.0, comm_ms=0.5), message_ms=message_ms)
    slower = replace(costs, **{key: tuple(ms + host_ms for ms in getattr(costs, key)) for key in costs_of_passes})
    timeline = simulate(schedule, slower)
    draw = random.Random(5)
    rows = (
        [timeline.computing(span)._replace(start_ms=timeline.computing(span).start_ms + host_ms) for span in row]
        for row in timeline.spans
    )
    spans = tuple(tuple(Span(p, start + noise_ms * draw.random(), end) for p, start, end in row) for row in rows)
    return Timeline(schedule, spans), costs


costs_of_passes = ("forward_ms", "backward_ms", "wgrad_ms")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("message_ms", [0.0, 0.25, 0.75])
def test_costs_of_a_run_have_its_message_time(name: str, message_ms: float) -> None:
    """The recorded costs then predict the iteration, also where transfers are waited for."""
    timeline, costs = recorded(name, message_ms)
    found = median_costs([timeline])
    assert found.message_ms == pytest.approx(message_ms, abs=1e-9)
    assert found.comm_ms == pytest.approx(costs.comm_ms)
    planned = simulate(timeline.schedule, found)
    assert planned.makespan_ms == pytest.approx(simulate(timeline.schedule, costs).makespan_ms)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_gaps_without_messages_are_not_theirs(name: str) -> None:
    """The host takes 0.4 ms before every pass, and up to 0.1 ms more at random."""
    timeline, _ = recorded(name, 0.25, host_ms=0.4, noise_ms=0.1)
    assert median_costs([timeline]).message_ms == pytest.approx(0.25, abs=0.05)


def test_a_message_that_is_waited_for_says_nothing() -> None:
    """With transfers longer than passes, the gaps are the transfers' own."""
    schedule = build("1f1b", num_ranks=4, num_microbatches=12)
    timeline = simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0, comm_ms=30.0))
    assert median_costs([timeline]).message_ms == pytest.approx(0.0, abs=1e-9)


def test_not_measurable_is_0() -> None:
    """On one rank there are no messages, and between other ops the gaps are not those of messages."""
    alone = build("1f1b", num_ranks=1, num_microbatches=3)
    assert measured_message_ms([simulate(alone, PassCosts((1.0,), (1.0,), (1.0,)))], 0.0) == 0.0
    timeline, _ = recorded("1f1b", 0.5)
    busy = replace(timeline, lanes=((LaneSpan(COMPUTE, "wait", 0.0, 0.0),),) * 4)
    assert measured_message_ms([busy], 0.5) == 0.0

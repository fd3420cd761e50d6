"""Tests of the difference between plan and measurement: every ms has one cause, and injected delays are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.difference import explain
from megatron.zero_bubble.core.analysis.trace import RankTrace, Trace
from megatron.zero_bubble.core.ir import Pass
from tests.helpers.delayed import Delays, run
from tests.helpers.strategies import costs_for, schedules


@st.composite
def iterations(draw: st.DrawFn) -> tuple[Schedule, PassCosts, dict[str, Delays]]:
    schedule = draw(schedules())
    costs = draw(costs_for(schedule))
    some = st.dictionaries(st.sampled_from(list(schedule.passes())), st.floats(0.0, 30.0), max_size=6)
    return schedule, costs, {"slow": draw(some), "transfer": draw(some), "host": draw(some)}


@given(iterations())
def test_causes_add_up_to_the_difference(case: tuple[Schedule, PassCosts, dict[str, Delays]]) -> None:
    schedule, costs, delays = case
    planned, trace = simulate(schedule, costs), run(schedule, costs, **delays)
    difference = explain(planned, trace, costs)
    longer = trace.timeline.makespan_ms - planned.makespan_ms
    assert difference.makespan_ms == pytest.approx(longer, abs=1e-6)
    assert difference.slack_ms <= 1e-6
    for rank, row in enumerate(difference.ranks):
        idle = [
            timeline.makespan_ms - sum(end - start for _, start, end in timeline.spans[rank])
            for timeline in (planned, trace.timeline)
        ]
        assert row.idle_ms == pytest.approx(idle[1] - idle[0], abs=1e-6)
        assert row.slow_ms + row.idle_ms == pytest.approx(longer, abs=1e-6)
        assert len(row.steps) == len(schedule.order[rank])


@given(iterations())
def test_injected_delays_are_attributed(case: tuple[Schedule, PassCosts, dict[str, Delays]]) -> None:
    """Slow passes and host gaps are found per pass; the chain attributes at most the injected time to each cause."""
    schedule, costs, delays = case
    difference = explain(simulate(schedule, costs), run(schedule, costs, **delays), costs)
    # Time starts at the first pass, so that a host gap before it is not visible.
    first = {row[0] for row in schedule.order}
    for row in difference.ranks:
        for step in row.steps:
            assert step.slow_ms == pytest.approx(delays["slow"].get(step.pass_, 0.0), abs=1e-6)
            if step.pass_ not in first:
                assert step.host_ms == pytest.approx(delays["host"].get(step.pass_, 0.0), abs=1e-6)
    for name, value in (("slow", difference.slow_ms), ("transfer", difference.transfer_ms)):
        assert -1e-6 <= value <= sum(delays[name].values()) + 1e-6


@given(iterations())
def test_causes_add_up_without_recorded_receives(case: tuple[Schedule, PassCosts, dict[str, Delays]]) -> None:
    schedule, costs, delays = case
    recorded = run(schedule, costs, **delays)
    trace = Trace(recorded.timeline, tuple(RankTrace(row) for row in recorded.timeline.spans))
    planned = simulate(schedule, costs)
    difference = explain(planned, trace, costs)
    longer = trace.timeline.makespan_ms - planned.makespan_ms
    assert difference.makespan_ms == pytest.approx(longer, abs=1e-6)
    for row in difference.ranks:
        assert row.slow_ms + row.idle_ms == pytest.approx(longer, abs=1e-6)
        assert all(step.host_ms >= -1e-6 for step in row.steps)


SLOW = build("zb-h1", num_ranks=4, num_microbatches=8)
EQUAL = PassCosts.uniform(SLOW.placement, 10, 10, 10, 1)


@pytest.mark.parametrize(
    ("delays", "read"),
    [
        ({"slow": {Pass.parse("3F2"): 5.0}}, lambda d: d.slow_ms),
        ({"transfer": {Pass.parse("2F2"): 5.0}}, lambda d: d.transfer_ms),
        ({"host": {Pass.parse("3F2"): 5.0}}, lambda d: d.host_ms),
    ],
    ids=["slow pass", "slow transfer", "host gap"],
)
def test_delay_on_the_critical_chain_is_attributed(delays: dict[str, Delays], read: Callable[..., float]) -> None:
    """In ZB-H1's steady state the last rank is never idle, so its delays lengthen the iteration."""
    planned, trace = simulate(SLOW, EQUAL), run(SLOW, EQUAL, **delays)
    difference = explain(planned, trace, EQUAL)
    assert read(difference) == pytest.approx(5.0)
    assert difference.makespan_ms == pytest.approx(trace.timeline.makespan_ms - planned.makespan_ms)
    assert difference.slow_ms + difference.transfer_ms + difference.host_ms == pytest.approx(5.0)


def test_late_receive_names_its_producer() -> None:
    difference = explain(simulate(SLOW, EQUAL), run(SLOW, EQUAL, slow={Pass.parse("0F0"): 7.0}), EQUAL)
    step = difference.ranks[1].steps[0]
    assert (str(step.pass_), str(step.waits_for)) == ("1F0", "0F0")
    assert step.waited_ms == pytest.approx(18.0)
    assert step.late_ms == pytest.approx(7.0)
    assert step.host_ms == pytest.approx(0.0)


def test_wait_before_the_first_pass_is_ignored() -> None:
    """The other ranks wait for their first inputs before rank 0 starts."""
    trace = run(SLOW, EQUAL)
    early = tuple(
        replace(row, receives=(row.receives[0]._replace(posted_ms=-6.0, awaited_ms=-5.0), *row.receives[1:]))
        for row in trace.ranks
    )
    planned = simulate(SLOW, EQUAL)
    assert explain(planned, Trace(trace.timeline, early), EQUAL) == explain(planned, trace, EQUAL)


def test_other_order_is_rejected() -> None:
    other = build("1f1b", num_ranks=4, num_microbatches=8)
    with pytest.raises(ValueError, match="same order of passes; got plan '1f1b' for iteration 'zb-h1'"):
        explain(simulate(other, EQUAL), run(SLOW, EQUAL), EQUAL)

"""Tests of the simulator: recomputed starts, small handmade cases, and orders that cannot run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import (
    PassCosts,
    PassMemory,
    Placement,
    Schedule,
    ScheduleError,
    Slices,
    Timeline,
    build,
    simulate,
)
from tests.helpers.strategies import costs_for, schedules
from tests.helpers.work import lines_run


def by_hand(rows: list[str], placement: Placement, num_microbatches: int, num_slices: int = 1) -> Schedule:
    return Schedule.from_text(
        "by hand", placement, num_microbatches, (row.split() for row in rows), Slices.even(num_slices)
    )


@given(st.data())
def test_every_pass_starts_as_early_as_possible(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    costs = data.draw(costs_for(schedule))
    timeline = simulate(schedule, costs)
    rank_of = schedule.placement.stage_to_rank
    end = {span.pass_: span.end_ms for row in timeline.spans for span in row}
    for rank, row in enumerate(timeline.spans):
        assert tuple(span.pass_ for span in row) == schedule.order[rank]
        free = 0.0
        for p, start_ms, end_ms in row:
            arrivals = [end[d] + costs.comm(rank_of[d.stage], rank) for d in schedule.dependencies(p)]
            assert start_ms == max([free, *arrivals])
            assert end_ms == start_ms + costs.duration(p, schedule.slices)
            free = end_ms


@given(st.data())
def test_makespan_exceeds_span_and_rates_are_within_bounds(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    costs = data.draw(costs_for(schedule))
    timeline = simulate(schedule, costs)
    per_stage = [sum(passes) for passes in zip(costs.forward_ms, costs.backward_ms, costs.wgrad_ms, strict=True)]
    stages_of = schedule.placement.stages_of
    work = schedule.num_microbatches * max(
        sum(per_stage[s] for s in stages_of(rank)) for rank in range(schedule.num_ranks)
    )
    assert timeline.work_ms == pytest.approx(work)
    assert timeline.makespan_ms >= timeline.span_ms >= timeline.work_ms * (1 - 1e-12)
    assert -1e-12 <= timeline.bubble_rate("span") <= timeline.bubble_rate("makespan") < 1


def test_handmade_v_with_two_chunks() -> None:
    """Rank 1 has stages 1 and 2, so that 2F0 needs no transfer from 1F0."""
    rows = ["0F0 3F0 3B0 0B0 3W0 0W0", "1F0 2F0 2BW0 1BW0"]
    schedule = by_hand(rows, Placement.vee(2), 1)
    timeline = simulate(schedule, PassCosts((1.0,) * 4, (2.0,) * 4, (4.0,) * 4, comm_ms=10.0))
    starts = {str(span.pass_): span.start_ms for row in timeline.spans for span in row}
    assert starts == {
        "0F0": 0, "1F0": 11, "2F0": 12, "3F0": 23, "3B0": 24, "2BW0": 36, "1BW0": 42, "0B0": 58, "3W0": 60, "0W0": 64,
    }  # fmt: skip
    assert timeline.makespan_ms == 68
    assert timeline.span_ms == 68
    assert timeline.peak_activation == (1.0, 1.0)


def test_slices_run_forward_in_order_and_backward_in_reverse() -> None:
    schedule = by_hand(["0F0 0F0.1 0BW0.1 0BW0"], Placement.linear(1), 1, num_slices=2)
    timeline = simulate(schedule, PassCosts((2.0,), (2.0,), (2.0,)))
    assert timeline.makespan_ms == 6.0
    assert timeline.peak_activation == (1.0,)
    wrong = by_hand(["0F0 0F0.1 0BW0 0BW0.1"], Placement.linear(1), 1, num_slices=2)
    with pytest.raises(ScheduleError, match=r"rank 0 stops at 0BW0, which waits for 0BW0.1 on rank 0"):
        simulate(wrong, PassCosts((2.0,), (2.0,), (2.0,)))


def test_span_and_makespan_differ_by_the_late_start() -> None:
    """A rank that starts late and works without gaps has no bubble by span, but one by makespan."""
    schedule = build("zb-h2", num_ranks=4, num_microbatches=8)
    timeline = simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0))
    assert (timeline.span_ms, timeline.makespan_ms) == (24.0, 27.0)
    assert timeline.bubble_rate("span") == 0.0
    assert timeline.bubble_rate("makespan") == pytest.approx(3 / 27)


def test_peaks_are_in_units_of_the_ranks_own_microbatch() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    costs = PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0)
    assert simulate(schedule, costs, PassMemory((50.0, 7.0), (1.0, 1.0))).peak_activation == (2.0, 1.0)


def test_wgrad_larger_than_the_activation_peaks_after_b() -> None:
    schedule = build("zb-h1", num_ranks=1, num_microbatches=1)
    costs = PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0)
    assert simulate(schedule, costs, PassMemory((1.0,), (3.0,))).peak_activation == (3.0,)


def test_deadlock_error_names_ranks_and_passes() -> None:
    rows = ["0F0 0BW0 0F1 0BW1", "1F1 1F0 1BW0 1BW1"]
    with pytest.raises(ScheduleError) as caught:
        simulate(by_hand(rows, Placement.linear(2), 2), PassCosts((1.0,) * 2, (1.0,) * 2, (1.0,) * 2))
    message = str(caught.value)
    assert "rank 0 stops at 0BW0, which waits for 1BW0 on rank 1" in message
    assert "rank 1 stops at 1F1, which waits for 0F1 on rank 0" in message
    assert ">0BW0<" in message


def test_wait_for_a_missing_pass_is_rejected() -> None:
    with pytest.raises(ScheduleError, match="rank 1 stops at 1F0, which waits for 0F0 that no rank runs"):
        simulate(by_hand(["", "1F0"], Placement.linear(2), 1), PassCosts((1.0,) * 2, (1.0,) * 2, (1.0,) * 2))


def test_costs_with_other_number_of_stages_are_rejected() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=1)
    with pytest.raises(ValueError, match="2 stages and costs 3"):
        simulate(schedule, PassCosts((1.0,) * 3, (1.0,) * 3, (1.0,) * 3))
    with pytest.raises(ValueError, match="2 stages and memory 1"):
        simulate(schedule, PassCosts((1.0,) * 2, (1.0,) * 2, (1.0,) * 2), PassMemory((1.0,), (1.0,)))


def test_zero_times_have_no_bubble() -> None:
    schedule = build("zb-h1", num_ranks=2, num_microbatches=1)
    timeline = simulate(schedule, PassCosts((0.0,) * 2, (0.0,) * 2, (0.0,) * 2))
    assert timeline.bubble_rate("span") == timeline.bubble_rate("makespan") == 0.0
    assert Timeline(schedule, ()).makespan_ms == 0.0


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v"])
def test_work_is_linear_in_the_number_of_passes(name: str) -> None:
    """Eight times the microbatches take eight times the work, so no loop over all passes runs per pass."""

    def work(m: int) -> int:
        schedule = build(name, num_ranks=8, num_microbatches=m)
        costs = PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0, 0.1)
        return lines_run(lambda: simulate(schedule, costs))

    assert work(128) < 8.5 * work(16)

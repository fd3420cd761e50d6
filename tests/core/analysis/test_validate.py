"""Tests of the validator: accepted orders, and the cell that it marks in rejected ones."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.zero_bubble import Kind, Pass, PassCosts, Placement, Schedule, ScheduleError, build, simulate, validate
from tests.helpers.strategies import schedules

Rows = list[list[Pass]]


def mutable(schedule: Schedule) -> Rows:
    return [list(row) for row in schedule.order]


def with_rows(schedule: Schedule, rows: Rows) -> Schedule:
    return replace(schedule, order=tuple(map(tuple, rows)))


def rejected(schedule: Schedule, bad: Pass | None = None) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    marks = re.findall(r">(\S+)<", str(caught.value))
    assert marks == [str(caught.value.bad)]
    if bad is not None:
        assert caught.value.bad == bad
    return caught.value


@st.composite
def cells(draw: st.DrawFn, schedule: Schedule) -> tuple[int, int]:
    rank = draw(st.integers(0, schedule.num_ranks - 1))
    return rank, draw(st.integers(0, len(schedule.order[rank]) - 1))


@given(st.data())
def test_missing_pass_is_rejected(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    rank, column = data.draw(cells(schedule))
    rows = mutable(schedule)
    dropped = rows[rank].pop(column)
    # Without BW, the validator expects split backwards, of which B is the first half.
    expected = dropped._replace(kind=Kind.B) if dropped.kind is Kind.BW else dropped
    error = rejected(with_rows(schedule, rows), expected)
    assert error.rank == rank
    assert "missing" in error.rule


@given(st.data())
def test_repeated_pass_is_rejected_at_its_second_position(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    rank, column = data.draw(cells(schedule))
    rows = mutable(schedule)
    rows[rank].insert(data.draw(st.integers(0, len(rows[rank]))), rows[rank][column])
    assert "must run once" in rejected(with_rows(schedule, rows), schedule.order[rank][column]).rule


@given(st.data())
def test_pass_on_another_rank_is_rejected(data: st.DataObject) -> None:
    schedule = data.draw(schedules(min_ranks=2))
    rank, column = data.draw(cells(schedule))
    other = data.draw(st.integers(0, schedule.num_ranks - 1))
    assume(other != rank)
    rows = mutable(schedule)
    moved = rows[rank].pop(column)
    rows[other].insert(data.draw(st.integers(0, len(rows[other]))), moved)
    error = rejected(with_rows(schedule, rows), moved)
    assert (error.rank, error.rule) == (
        other, f"{moved} must run on rank {rank}, which holds stage {moved.stage}; it is on rank {other}",
    )  # fmt: skip


@given(st.data())
def test_swapping_a_pass_with_its_own_dependency_is_rejected(data: st.DataObject) -> None:
    """Moves F after the backward of the same slice of a microbatch, or B after its W, on the same rank."""
    schedule = data.draw(schedules())
    rank, column = data.draw(cells(schedule))
    rows = mutable(schedule)
    first = rows[rank][column]
    of = first.stage, first.microbatch, first.slice
    after = next((p for p in rows[rank][column + 1 :] if (p.stage, p.microbatch, p.slice) == of), None)
    assume(after is not None)
    assert after is not None
    other = rows[rank].index(after)
    rows[rank][column], rows[rank][other] = after, first
    error = rejected(with_rows(schedule, rows))
    if first.kind is Kind.B:
        assert (error.bad, error.rule) == (after, f"{after} must come after {first} on rank {rank}")


@given(st.data())
def test_swap_is_rejected_if_and_only_if_it_cannot_run(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    (rank, one), rows = data.draw(cells(schedule)), mutable(schedule)
    other = data.draw(st.integers(0, len(rows[rank]) - 1))
    rows[rank][one], rows[rank][other] = rows[rank][other], rows[rank][one]
    swapped = with_rows(schedule, rows)
    costs = PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0)
    try:
        simulate(swapped, costs)
    except ScheduleError:
        rejected(swapped)
    else:
        validate(swapped)


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("1W0", "1W7", "a microbatch must be within 0..2; rank 1 has 1W7"),
        ("1W0", "5W0", "a stage must be within 0..1; rank 1 has 5W0"),
        ("1W0", "1W0.1", "a slice must be within 0..0; rank 1 has 1W0.1"),
        ("1W0", "1BW0", "a backward is either fused or split; rank 1 has both 1BW0 and 1B0"),
    ],
)
def test_violated_rule_is_named(old: str, new: str, rule: str) -> None:
    schedule = build("zb-h1", num_ranks=2, num_microbatches=3)
    rows = [[Pass.parse(new) if str(p) == old else p for p in row] for row in schedule.order]
    error = rejected(with_rows(schedule, rows))
    assert error.rule == rule
    assert error.rank == 1


def test_large_grid_shows_only_the_marked_cells_neighbours() -> None:
    schedule = build("zb-h1", num_ranks=64, num_microbatches=128)
    rows = mutable(schedule)
    rows[40].remove(Pass.parse("40W60"))
    message = str(rejected(with_rows(schedule, rows), Pass.parse("40W60")))
    assert len(message) < 4000
    assert "rank 32" in message
    assert "rank 31 " not in message


def test_small_grid_is_shown_completely() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    rows = mutable(schedule)
    rows[0].append(Pass.parse("0F0"))
    assert str(rejected(with_rows(schedule, rows))) == (
        "1f1b: 0F0 must run once; rank 0 repeats it\n"
        "rank 0  0F0   0F1   0BW0  0BW1 >0F0<\n"
        "rank 1  1F0   1BW0  1F1   1BW1"
    )


def test_number_of_lists_must_equal_number_of_ranks() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match="one list for each of the 2 ranks; got 1"):
        validate(replace(schedule, order=schedule.order[:1]))


def test_forward_only_and_training_orders_are_distinguished() -> None:
    schedule = build("zb-h1", num_ranks=2, num_microbatches=2)
    with pytest.raises(ScheduleError, match="0B0; it is missing"):
        validate(schedule.forward_only())
    with pytest.raises(ScheduleError, match="only F passes; rank 0 has 0B0"):
        validate(schedule, forward_only=True)


def test_chunks_of_a_rank_can_mix_fused_and_split_backwards() -> None:
    rows = ["0F0 3F0 3B0 0B0 3W0 0W0".split(), "1F0 2F0 2BW0 1BW0".split()]
    validate(Schedule.from_text("v", Placement.vee(2), 1, rows))


def test_error_can_be_pickled() -> None:
    rows = [["0F0"]]
    error = rejected(Schedule.from_text("x", Placement.linear(1), 1, rows), Pass.parse("0B0"))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.bad) == (str(error), error.rank, error.bad)

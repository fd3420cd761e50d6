"""Units of microbatches: idle time, memory and order of ``zero-pp``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import Kind, PassCosts, PassMemory, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.analysis.validate import validate
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.render.text import render_text
from megatron.zero_bubble.core.schedules import zero_pp
from megatron.zero_bubble.planning.job.runnable import check_runnable


def timeline(schedule: Schedule) -> Timeline:
    """F, B and W of a rank take one unit of time each, and M_W is 32/34 of M_B."""
    placement = schedule.placement
    return simulate(schedule, PassCosts.uniform(placement, 1.0, 1.0, 1.0), PassMemory.uniform(placement, 34.0, 32.0))


def units(p: int, v: int, m: int, size: int) -> Schedule:
    return build("zero-pp", num_ranks=p, num_microbatches=m, num_chunks=v, unit_microbatches=size)


@pytest.mark.parametrize(("size", "peak"), [(32, 32.0), (16, 19.5), (8, 12.0)])
def test_units_have_the_bubble_of_one_unit_in_less_memory(size: int, peak: float) -> None:
    """The row of the published comparison: 8 ranks, 4 chunks, 32 microbatches."""
    done = timeline(units(8, 4, 32, size))
    assert done.makespan_ms - done.work_ms == pytest.approx(3.5)
    assert max(done.peak_activation) <= peak


@given(
    p=st.integers(2, 6),
    v=st.integers(2, 4),
    number=st.integers(1, 4),
    more=st.integers(0, 3),
)
def test_idle_and_memory_match_closed_forms(p: int, v: int, number: int, more: int) -> None:
    """Units of one or more microbatches per rank, enough W's to fill the gaps, and no remainder."""
    size = max(p + more, -(-2 * (p - 1) // v))
    schedule = units(p, v, number * size, size)
    validate(schedule)
    check_runnable(schedule, p, number * size)
    done = timeline(schedule)
    assert done.makespan_ms - done.work_ms == pytest.approx(2 * (p - 1) / v)
    assert max(done.peak_activation) <= size + 2 * (p - 1) / v + 1e-9


@given(p=st.integers(1, 5), v=st.integers(2, 4), m=st.integers(1, 13), size=st.integers(1, 15))
def test_every_size_is_valid(p: int, v: int, m: int, size: int) -> None:
    schedule = units(p, v, m, size)
    validate(schedule)
    check_runnable(schedule, p, m)


def test_one_unit_is_breadth_first_with_split_backwards() -> None:
    def without_wgrad(schedule: Schedule) -> list[list[tuple[int, bool, int]]]:
        rows = ([p for p in row if p.kind is not Kind.W] for row in schedule.order)
        return [[(p.stage, p.kind is Kind.F, p.microbatch) for p in row] for row in rows]

    whole = units(4, 3, 8, 8)
    assert without_wgrad(whole) == without_wgrad(build("breadth-first", num_ranks=4, num_microbatches=8, num_chunks=3))


def test_default_unit_is_one_microbatch_per_rank() -> None:
    assert build("zero-pp", num_ranks=4, num_microbatches=12) == units(4, 2, 12, 4)
    assert zero_pp.unit_sizes(13, 4) == [4, 4, 4, 1]


def test_docstring_picture_is_up_to_date() -> None:
    schedule = zero_pp.build(2, 4, 2)
    done = simulate(schedule, PassCosts.uniform(schedule.placement, 2.0, 2.0, 2.0))
    assert render_text(done) in (zero_pp.__doc__ or "")


@pytest.mark.parametrize(
    ("name", "size", "what"),
    [
        ("zero-pp", 0, "schedule 'zero-pp' needs 1 or more microbatches per unit; got units of 0"),
        ("zb-h1", 4, "schedule 'zb-h1' has no units of microbatches; got units of 4; leave the number out"),
        ("seq-1f1b", 4, "schedule 'seq-1f1b' has no units of microbatches"),
    ],
)
def test_unsupported_units_are_refused(name: str, size: int, what: str) -> None:
    with pytest.raises(UserError, match=what):
        build(name, num_ranks=2, num_microbatches=4, unit_microbatches=size)

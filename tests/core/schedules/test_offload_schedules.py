"""The schedules of PipeOffload: closed forms of length and memory, validity, and docstring pictures."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, Schedule, build, simulate, validate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.ir import Kind
from megatron.zero_bubble.core.render.text import render_text
from megatron.zero_bubble.core.schedules import gis, gis_h, pipe_offload

NAMES = ("gis", "gis-h", "pipe-offload")


def in_unit_time(schedule: Schedule) -> Timeline:
    ones = (1.0,) * schedule.num_stages
    return simulate(schedule, PassCosts(ones, ones, ones))


def bubble_and_chunks(schedule: Schedule, num_chunks: int) -> tuple[float, float]:
    """The idle time in passes, and the peak in chunks."""
    timeline = in_unit_time(schedule)
    work = 3 * num_chunks * schedule.num_microbatches
    return timeline.makespan_ms - work, max(timeline.peak_activation) * num_chunks


@pytest.mark.parametrize("v", [2, 4])
@pytest.mark.parametrize("d", [4, 5, 7, 8, 16])
def test_groups_match_the_closed_forms(d: int, v: int) -> None:
    """arXiv 2503.01328, section 3: at most g(v-1)+d chunks, and a bubble of 2(d-1)+(d-g)(v-1) passes."""
    for g in range((d + 1) // 2, d + 1):
        schedule = gis.grouped("any", d, 4 * g, v, g)
        expected = 2 * (d - 1) + (d - g) * (v - 1), g * (v - 1) + d
        assert bubble_and_chunks(schedule, v) == pytest.approx(expected)


@pytest.mark.parametrize("v", [2, 4])
@pytest.mark.parametrize("d", [4, 8, 16])
def test_table_1_of_the_paper(d: int, v: int) -> None:
    for name, g in (("gis", d), ("gis-h", d // 2)):
        schedule = build(name, num_ranks=d, num_microbatches=4 * d, num_chunks=v)
        expected = 2 * (d - 1) + (d - g) * (v - 1), g * (v - 1) + d
        assert bubble_and_chunks(schedule, v) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("d", "v", "bubble", "chunks"),
    [(4, 2, 9, 7), (4, 4, 18, 11), (4, 5, 23, 12), (8, 2, 23, 13), (8, 4, 41, 23), (8, 5, 56, 24)],
)
def test_uniform_repeating_is_no_longer_than_the_authors(d: int, v: int, bubble: int, chunks: int) -> None:
    """What the authors' released scheduler gives for a group of 1, without transfers."""
    schedule = build("pipe-offload", num_ranks=d, num_microbatches=4 * d, num_chunks=v)
    assert bubble_and_chunks(schedule, v) == pytest.approx((bubble, chunks))
    assert bubble < 3 * v * (d - 1)


@given(st.sampled_from(NAMES), st.integers(1, 9), st.integers(1, 30), st.integers(2, 5))
def test_valid_for_any_number_of_ranks_and_microbatches(name: str, d: int, m: int, v: int) -> None:
    schedule = build(name, num_ranks=d, num_microbatches=m, num_chunks=v)
    validate(schedule)
    validate(schedule.forward_only(), forward_only=True)
    for row in schedule.order:
        for before, p in pairwise(row):
            assert (p.kind is Kind.W) == (before.kind is Kind.B)


@given(st.integers(1, 9), st.integers(1, 30), st.integers(2, 5), st.data())
def test_groups_of_any_size_are_valid(d: int, m: int, v: int, data: st.DataObject) -> None:
    """Units that do not divide the microbatches are smaller, not larger, if they can be."""
    group = data.draw(st.integers((d + 1) // 2, d))
    schedule = gis.grouped("any", d, m, v, group)
    validate(schedule)
    if m >= d and group == d:
        assert bubble_and_chunks(schedule, v)[1] <= group * (v - 1) + d + 1e-9


@pytest.mark.parametrize(("module", "p", "m"), [(gis, 2, 4), (gis_h, 4, 2), (pipe_offload, 2, 3)])
def test_docstring_pictures_are_up_to_date(module: ModuleType, p: int, m: int) -> None:
    assert render_text(in_unit_time(module.build(p, m, 2))) in (module.__doc__ or "")

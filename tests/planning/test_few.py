"""Few microbatches stand for many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.core.schedules import SCHEDULES
from megatron.zero_bubble.planning.few import extended, few, two_numbers


@given(num_ranks=st.integers(2, 64), num_microbatches=st.integers(1, 2000))
def test_units_of_microbatches_stay_whole(num_ranks: int, num_microbatches: int) -> None:
    short = few(num_ranks, num_microbatches)
    assert short <= num_microbatches and (num_microbatches - short) % num_ranks == 0
    assert short == num_microbatches or 3 * num_ranks <= short < 4 * num_ranks
    if (counts := two_numbers(num_ranks, num_microbatches)) is not None:
        assert counts == (short - num_ranks, short) and 4 * sum(counts) <= 3 * num_microbatches


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        (name, count)
        for name, recipe in SCHEDULES.items()
        if not (recipe.sliced or recipe.has_units)
        for count in ((2, 3) if recipe.shape == "interleaved" else (None,))
    ],
)
def test_two_numbers_of_microbatches_tell_the_length_and_memory_of_many(name: str, chunks: int | None) -> None:
    """With uneven passes, a length may be too short, because delays add up, and hardly ever too long."""
    ranks, count = 4, 66
    counts = two_numbers(ranks, count)
    assert counts is not None

    def of(number: int) -> tuple[float, ...]:
        schedule = build(name, num_ranks=ranks, num_microbatches=number, num_chunks=chunks)
        stages = range(schedule.num_stages)
        f, b, w = (tuple(ms + 0.01 * (stage * by % 7) for stage in stages) for ms, by in ((1.0, 3), (1.3, 2), (0.8, 5)))
        timeline = simulate(schedule, PassCosts(f, b, w, 0.05))
        return timeline.makespan_ms, *timeline.peak_activation

    (ms, *peaks), (whole, *most) = extended(of(counts[0]), of(counts[1]), counts, count), of(count)
    assert peaks == pytest.approx(most)
    assert 0.97 * whole < ms < 1.001 * whole

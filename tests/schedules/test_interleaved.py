"""Interleaved 1F1B: valid, as long as theory says, and its picture."""

from __future__ import annotations

import pytest

from megatron.zero_bubble import PassCosts, simulate, validate
from megatron.zero_bubble.render.text import render_text
from megatron.zero_bubble.schedules import interleaved


@pytest.mark.parametrize(
    ("p", "m", "v"), [(1, 3, 2), (2, 2, 2), (2, 6, 3), (4, 4, 2), (4, 12, 2), (4, 16, 3), (8, 16, 4)]
)
def test_length_and_memory(p: int, m: int, v: int) -> None:
    """mS + (p-1)S/v and 2pv-2 transfers; at most 2(p-1) + (v-1)p + 1 chunks are kept."""
    schedule = interleaved.build(p, m, v)
    validate(schedule)
    f, b, w, c = 3.0, 2.0, 4.0, 0.125
    timeline = simulate(schedule, PassCosts.uniform(schedule.placement, f, b, w, c if p > 1 else 0.0))
    if m >= 2 * p or p == 1:
        hops = 2 * p * v - 2 if p > 1 else 0
        assert timeline.span_ms == pytest.approx(m * (f + b + w) + (p - 1) * (f + b + w) / v + hops * c)
    chunks = min(m * v, 2 * (p - 1) + (v - 1) * p + 1)
    assert max(timeline.peak_activation) == pytest.approx(chunks / v)


def test_the_picture_in_the_docstring() -> None:
    schedule = interleaved.build(2, 4, 2)
    drawn = render_text(simulate(schedule, PassCosts((1.0,) * 4, (1.0,) * 4, (1.0,) * 4)))
    assert drawn in interleaved.__doc__


def test_microbatches_must_fill_whole_units() -> None:
    with pytest.raises(ValueError, match="multiples of the 4 ranks; got 6"):
        interleaved.build(4, 6, 2)

"""Tests of the handcrafted schedules: pictures, published bubble rates, and validity for any p and m."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import SCHEDULES, PassCosts, PassMemory, Schedule, build, simulate, validate
from megatron.zero_bubble.core.render.text import render_text
from megatron.zero_bubble.core.schedules import letters, one_f_one_b, zb_h1, zb_h2
from tests.helpers.strategies import num_microbatches, num_ranks, schedules

ROOT = Path(__file__).parents[3]
LINEAR = {module.RECIPE.name: module for module in (one_f_one_b, zb_h1, zb_h2)}
with (ROOT / "configs/published/zero_bubble_table5.csv").open() as file:
    TABLE = list(csv.DictReader(line for line in file if not line.startswith("#")))


@pytest.mark.parametrize("name", SCHEDULES)
def test_picture_matches_docstring_and_golden_file(name: str) -> None:
    """The docstring and the golden file show the built schedule; UPDATE_GOLDEN=1 writes the file."""
    schedule = build(name, num_ranks=4, num_microbatches=8)
    picture = render_text(simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0)))
    golden = ROOT / f"tests/golden/{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(picture)
    assert golden.exists(), f"tests/golden/{name}.txt is missing; UPDATE_GOLDEN=1 pytest tests/core/schedules writes it"
    assert golden.read_text() == picture
    if name in LINEAR:
        assert picture in (LINEAR[name].__doc__ or "")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['model']}-m{row['m']}")
def test_bubble_rates_equal_table_5(row: dict[str, str]) -> None:
    """All 36 values of the paper's table 5, to its four decimals."""
    for name, column in (("1f1b", "one_f_one_b"), ("zb-h1", "zb_h1"), ("zb-h2", "zb_h2")):
        schedule = build(name, num_ranks=int(row["p"]), num_microbatches=int(row["m"]))
        times = (float(row[key]) for key in ("t_f_ms", "t_b_ms", "t_w_ms", "t_comm_ms"))
        timeline = simulate(schedule, PassCosts.uniform(schedule.placement, *times))
        assert f"{timeline.bubble_rate('span'):.4f}" == row[column], name


def test_published_table_is_complete() -> None:
    assert len(TABLE) == 12


@given(schedules())
def test_valid_for_any_number_of_ranks_and_microbatches(schedule: Schedule) -> None:
    validate(schedule)
    validate(schedule.forward_only(), forward_only=True)


@given(num_ranks, num_microbatches, st.floats(0.0, 1.0))
def test_peak_memory_equals_the_papers(p: int, m: int, wgrad: float) -> None:
    """Section 3: rank i (from 1) stores p-i+1 M_B and i-1 M_W in ZB-H1, 2p-2i+1 M_B and 2i-2 M_W in ZB-H2."""
    h1 = [p - i + 1 + (i - 1) * wgrad for i in range(1, p + 1)]
    h2 = [2 * p - 2 * i + 1 + (2 * i - 2) * wgrad for i in range(1, p + 1)]
    one_f_one_b_peaks = [float(p - i + 1) for i in range(1, p + 1)]
    for name, peaks, enough in (("1f1b", one_f_one_b_peaks, p), ("zb-h1", h1, p), ("zb-h2", h2, 2 * p - 1)):
        schedule = build(name, num_ranks=p, num_microbatches=m)
        costs = PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0)
        timeline = simulate(schedule, costs, PassMemory.uniform(schedule.placement, 1.0, wgrad))
        if m >= enough:
            assert timeline.peak_activation == pytest.approx(peaks)
        else:
            assert all(got <= limit + 1e-9 for got, limit in zip(timeline.peak_activation, peaks, strict=True))
        assert max(timeline.peak_activation) <= m


@given(st.integers(1, 8), st.integers(0, 12), st.floats(1.0, 50.0), st.floats(0.0, 1.0), st.floats(0.0, 50.0))
def test_bubbles_without_communication_equal_the_papers(p: int, more: int, f: float, part: float, above: float) -> None:
    """The closed forms of section 3, which require W <= F, W <= B and enough microbatches to fill the pipeline."""
    w = f * part
    b = w + above
    m = 2 * p - 1 + more
    bubbles = {"1f1b": f + b + w, "zb-h1": f + b - w, "zb-h2": f + b - 2 * w}
    for name, bubble in bubbles.items():
        schedule = build(name, num_ranks=p, num_microbatches=m)
        timeline = simulate(schedule, PassCosts.uniform(schedule.placement, f, b, w))
        assert timeline.span_ms == pytest.approx(m * (f + b + w) + (p - 1) * bubble), name


def test_letters_build_and_delay_orders() -> None:
    assert letters.forward_backward(4, warmup=2) == "FFFBFBBB"
    assert letters.forward_backward(2, warmup=5) == "FFBB"
    assert letters.delay_wgrad("FFFBFBBB", lag=0) == "FFFBWFBWBWBW"
    assert letters.delay_wgrad("FFFBFBBB", lag=2) == "FFFBFBBWBWWW"
    assert letters.delay_wgrad("FFBB", lag=9) == "FFBBWW"
    assert list(map(str, letters.write(3, "FFBW"))) == ["3F0", "3F1", "3B0", "3W0"]


@pytest.mark.parametrize(
    ("name", "p", "m", "message"),
    [
        ("zb-h3", 2, 2, "unknown schedule 'zb-h3'; choose one of 1f1b, interleaved-1f1b, breadth-first, zb-h1"),
        ("zb-h1", 0, 2, "num_ranks must be 1 or more; got 0"),
        ("zb-h1", 2, -1, "num_microbatches must be 1 or more; got -1"),
    ],
)
def test_invalid_arguments_are_rejected(name: str, p: int, m: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, num_ranks=p, num_microbatches=m)

"""Tests of schedules on a V: pictures, and published peaks and bubbles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, PassMemory, Placement, build, simulate, validate
from megatron.zero_bubble.core.render.text import render_text
from megatron.zero_bubble.core.schedules import dualpipe_v, v_half, v_min, zb_v
from megatron.zero_bubble.core.search import zb_auto
from tests.helpers.rows import some

NAMES = ("zb-v", "v-half", "v-min", "dualpipe-v")
MODULES = {module.RECIPE.name: module for module in (zb_v, v_half, v_min, dualpipe_v)}


def equal(p: int) -> tuple[PassCosts, PassMemory]:
    ones = (1.0,) * 2 * p
    return PassCosts(ones, ones, ones), PassMemory(ones, ones)


@pytest.mark.parametrize("name", NAMES)
def test_picture_matches_docstring(name: str) -> None:
    drawn = render_text(simulate(build(name, num_ranks=2, num_microbatches=4), *equal(2)))
    assert drawn in (MODULES[name].__doc__ or "")


@pytest.mark.parametrize(("p", "m"), [(4, 16), (6, 24), (8, 32), (9, 36), (16, 64)])
@pytest.mark.parametrize(
    ("name", "peak"), [("zb-v", lambda p: p), ("v-half", lambda p: (p + 2) // 2), ("v-min", lambda p: (p + 4) // 3)]
)
def test_peaks_and_lengths_with_equal_passes_are_as_published(name: str, peak, p: int, m: int) -> None:
    """Controllable Memory's length is 6m + 6p - 3k - 1 for a peak of k chunks; ZB-V's span has no bubble."""
    timeline = simulate(build(name, num_ranks=p, num_microbatches=m), *equal(p))
    assert max(timeline.peak_activation) == peak(p)
    assert timeline.span_ms == (6 * m if name == "zb-v" else 6 * m + 6 * p - 6 * peak(p) - 1)


@given(st.sampled_from(NAMES), st.integers(1, 7), st.integers(1, 20))
def test_valid_for_any_number_of_ranks_and_microbatches(name: str, p: int, m: int) -> None:
    schedule = build(name, num_ranks=p, num_microbatches=m)
    assert schedule.placement == Placement.vee(p)
    validate(schedule)
    validate(schedule.forward_only(), forward_only=True)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 20)])
def test_dualpipe_v_bubble_equals_its_formula(p: int, m: int) -> None:
    """The bubble without overlap of paired F and B is (p-1)(F+B-2W) in chunks, where its B is our B and W together."""
    timeline = simulate(build("dualpipe-v", num_ranks=p, num_microbatches=m), *equal(p))
    assert timeline.span_ms == 6 * m + (p - 1)
    assert max(timeline.peak_activation) == p + 0.5


@pytest.mark.parametrize(("m", "published"), some([(48, 0.0697), (64, 0.0533), (128, 0.0274)], (48, 0.0697)))
def test_zb_v_bubble_rates_are_near_table_8(m: int, published: float) -> None:
    """Bubble rates of ZB-V at 6.2B and p=16, fitted to the costs.

    The paper does not print the profile; its ratios follow from the table's other columns to within a percent.
    """
    work = 1000.0
    wgrad, comm = 0.2515 * work, 0.0210 * work
    pattern = build("zb-v", num_ranks=16, num_microbatches=m)
    costs = PassCosts.uniform(pattern.placement, (work - wgrad) / 2, (work - wgrad) / 2, wgrad, comm)
    memory = PassMemory.uniform(pattern.placement, 1.0, 32 / 74)
    schedule = zb_auto(costs, memory, 16, m, 16.0, placement="vee", start=pattern)
    assert simulate(schedule, costs).bubble_rate("span") == pytest.approx(published, rel=0.01)

"""Tests of the text picture: scale, labels and passes that do not fit."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, Placement, Schedule, Timeline, build, simulate
from megatron.zero_bubble.core.analysis.timeline import Span
from megatron.zero_bubble.core.ir import Pass
from megatron.zero_bubble.core.render.text import headline, imbalance, render_text
from tests.helpers.strategies import costs_for, schedules


def unit(schedule: Schedule, wgrad_ms: float = 1.0) -> Timeline:
    return simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, wgrad_ms))


def test_two_digit_microbatches_widen_every_pass() -> None:
    picture = render_text(unit(build("1f1b", num_ranks=1, num_microbatches=11)))
    assert picture.startswith("rank 0 |F0- BW0---- F1- ")
    assert picture.endswith("F10 BW10--- |\n")


def test_very_short_pass_does_not_stretch_the_picture() -> None:
    """W takes a hundredth of F and B, too short for a letter, so it is omitted."""
    picture = render_text(unit(build("zb-h1", num_ranks=1, num_microbatches=2), wgrad_ms=0.01))
    assert picture == "rank 0 |F0--------- B0--------- F1--------- B1--------- |\n"


def test_stages_are_printed_with_several_stages_per_rank() -> None:
    rows = ["0F0 3F0 3BW0 0BW0".split(), "1F0 2F0 2BW0 1BW0".split()]
    timeline = simulate(
        Schedule.from_text("v", Placement.vee(2), 1, rows), PassCosts((1.0,) * 4, (1.0,) * 4, (1.0,) * 4)
    )
    assert render_text(timeline) == (
        "rank 0 |0F0 ........3F0 3BW0--- ................0BW0--- |\n"
        "rank 1 |....1F0 2F0 ............2BW0--- 1BW0--- ........|\n"
    )


def test_wide_picture_omits_its_middle() -> None:
    timeline = unit(build("zb-h2", num_ranks=12, num_microbatches=200))
    lines = render_text(timeline, max_width=100).splitlines()
    assert {len(line) for line in lines} == {100}
    assert all(" ~~ " in line for line in lines)
    assert lines[0].startswith(" rank 0 |F0-- F1-- ")
    assert lines[11].endswith("W199 |")


def test_measured_timeline_starts_at_its_first_pass() -> None:
    schedule = build("1f1b", num_ranks=1, num_microbatches=1)
    spans = (Span(Pass.parse("0F0"), 100.0, 101.0), Span(Pass.parse("0BW0"), 102.0, 104.0))
    timeline = Timeline(schedule, (spans,))
    assert render_text(timeline) == "rank 0 |F0 ...BW0-- |\n"
    rates = "bubble 25.0% of makespan, 25.0% of span, mean idle 25.0%"
    assert headline(timeline) == f"1f1b: 1 ranks, 1 microbatches, 4.0 ms, {rates}"


def test_a_rank_with_more_work_is_named() -> None:
    schedule = build("zb-h1", num_ranks=4, num_microbatches=8)
    costs = PassCosts.uniform(schedule.placement, 4.0, 5.0, 3.0)
    heavy = replace(costs, forward_ms=(4.0, 4.0, 4.0, 24.0))
    timeline = simulate(schedule, heavy)
    assert headline(timeline).endswith(f"mean idle {timeline.idle_rate('makespan'):.1%}")
    assert timeline.idle_rate("makespan") > timeline.bubble_rate("makespan") + 0.4
    assert imbalance(timeline) == "rank 3 has 1.88 x the mean work of the ranks"
    assert imbalance(simulate(schedule, costs)) is None
    assert imbalance(simulate(schedule, replace(costs, forward_ms=(4.0, 4.0, 4.0, 5.0)))) is None


def test_empty_timeline() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=1)
    assert render_text(Timeline(schedule, ((), ()))) == "rank 0 ||\nrank 1 ||\n"


@given(st.data())
def test_rows_have_equal_length_and_show_every_wide_enough_pass(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    lines = render_text(simulate(schedule, data.draw(costs_for(schedule)))).splitlines()
    assert len({len(line) for line in lines}) == 1
    if not schedule.slices.are_even:
        return  # at equal costs, a short slice may be too narrow for its label
    lines = render_text(unit(schedule)).splitlines()
    for line, row in zip(lines, schedule.order, strict=True):
        shown = re.sub(r"(?<!\d)\.|\.(?!\d)", " ", line.replace("-", "")).strip("|").split("|")[1].split()
        linear = schedule.num_stages == schedule.num_ranks
        assert shown == [str(p).removeprefix(str(p.stage)) if linear else str(p) for p in row]

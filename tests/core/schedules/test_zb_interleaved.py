"""ZB-Interleaved: validity, closed forms, the docstring's picture, and a comparison with other schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, PassMemory, build, simulate, validate
from megatron.zero_bubble.core.analysis.bounds import lower_bound
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.render.text import render_text
from megatron.zero_bubble.core.schedules import interleaved, zb_interleaved
from megatron.zero_bubble.core.search import fit
from megatron.zero_bubble.core.search.published import on_equal_passes
from megatron.zero_bubble.core.search.units import grouped


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(
    ("p", "times"), [(4, 1), (4, 2), (4, 4), (5, 3), (8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (16, 4)]
)
def test_no_rank_waits_from_two_microbatches_per_rank_on(p: int, times: int, v: int) -> None:
    """A pass of a chunk takes 1: 3mv of work; the last rank starts p-1 later, and with p microbatches it waits."""
    m = times * p
    schedule = zb_interleaved.build(p, m, v)
    validate(schedule)
    timeline = simulate(schedule, PassCosts.uniform(schedule.placement, v, v, v))
    assert timeline.makespan_ms == 3 * m * v + p - 1
    assert timeline.span_ms == 3 * m * v + (p - 1 if times == 1 else 0)
    assert max(timeline.peak_activation) == pytest.approx(min(m * v, (v + 1) * p - 1) / v)


@pytest.mark.parametrize("p", [4, 8, 16])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_never_longer_than_other_schedules_without_a_bubble(p: int, times: int) -> None:
    """``torch.distributed.pipelining`` delays the W's of rank i by i backwards, in the warm-up of GIS (ZB-H1)."""
    m = times * p
    ours = zb_interleaved.build(p, m, 2)
    costs = PassCosts.uniform(ours.placement, 2.0, 2.0, 2.0)
    question = on_equal_passes(ours.placement, m)
    torchs = question.schedule("ZB-H1 on a loop", grouped(question, p, factor=1, lag=1))
    others = [build("gis", num_ranks=p, num_microbatches=m), build("zb-v", num_ranks=p, num_microbatches=m), torchs]
    for metric in ("span_ms", "makespan_ms"):
        shortest = min(getattr(simulate(schedule, costs), metric) for schedule in others)
        assert getattr(simulate(ours, costs), metric) <= shortest


def test_docstring_picture_is_up_to_date() -> None:
    schedule = zb_interleaved.build(2, 4, 2)
    drawn = render_text(simulate(schedule, PassCosts.uniform(schedule.placement, 2.0, 2.0, 2.0)))
    assert drawn in (zb_interleaved.__doc__ or "")


@given(st.integers(1, 6), st.integers(1, 20), st.integers(2, 4))
def test_valid_within_the_memory_of_interleaved_1f1b(p: int, m: int, v: int) -> None:
    schedule = zb_interleaved.build(p, m, v)
    validate(schedule)
    costs = PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0)
    ours, theirs = (simulate(each, costs) for each in (schedule, interleaved.build(p, m, v)))
    assert max(ours.peak_activation) <= max(theirs.peak_activation) + 1e-9
    assert ours.makespan_ms <= theirs.makespan_ms + 1e-9


def test_fit_shortens_it_within_its_memory() -> None:
    schedule = zb_interleaved.build(4, 8, 3)
    costs, memory = PassCosts.uniform(schedule.placement, 12.0, 14.0, 9.0, 0.2), PassMemory.uniform(schedule.placement)
    before = simulate(schedule, costs, memory)
    fitted = fit(schedule, costs, memory)
    after = simulate(fitted, costs, memory)
    assert after.span_ms < before.span_ms
    assert max(most_kept(after, memory)) <= max(most_kept(before, memory)) * (1 + 1e-9)
    assert (fitted.name, fitted.placement) == (schedule.name, schedule.placement)
    assert (
        lower_bound(costs, memory, Workload(fitted.placement, 8), max(most_kept(after, memory))).value_ms
        <= after.span_ms
    )

"""Schedules of sequence slices: their bubbles and peaks by formula, and their orders by validation."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.analysis.validate import validate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Slices
from megatron.zero_bubble.core.schedules import build

F, B, W = 10.0, 11.0, 7.0
SIZES = [(p, m, n) for p in (2, 4, 8, 16) for m in sorted({1, 2, p, 3 * p}) for n in (1, 2, 4, 8, 16)]


def timeline(name: str, p: int, m: int, n: int, times: tuple[float, float, float] = (F, B, W)) -> Timeline:
    schedule = build(name, num_ranks=p, num_microbatches=m, num_slices=n)
    costs = PassCosts.uniform(schedule.placement, *times)
    return simulate(schedule, costs, PassMemory.uniform(schedule.placement))


def idle_ms(found: Timeline, times: tuple[float, float, float] = (F, B, W)) -> float:
    return found.makespan_ms - found.schedule.num_microbatches * sum(times)


@pytest.mark.parametrize(("p", "m", "n"), SIZES)
def test_seq_1f1b_has_the_bubble_and_peak_of_its_formulas(p: int, m: int, n: int) -> None:
    found = timeline("seq-1f1b", p, m, n)
    assert idle_ms(found) == pytest.approx((p - 1) * (F + B + W) / n, abs=1e-9 * found.makespan_ms)
    assert max(found.peak_activation) == pytest.approx(min(m, (n + p - 1) / n), abs=1e-9)


@pytest.mark.parametrize(("p", "m", "n"), SIZES)
def test_seq_zb_h1_has_the_bubble_and_peak_of_its_formulas(p: int, m: int, n: int) -> None:
    found = timeline("seq-zb-h1", p, m, n)
    exact = (p - 1) * (F + B - W) / n
    assert max(found.peak_activation) == pytest.approx(min(m, (n + p - 1) / n), abs=1e-9)
    if m * n >= n + p - 1:
        assert idle_ms(found) == pytest.approx(exact, abs=1e-9 * found.makespan_ms)
        return
    # With fewer slices than that, rank 0 runs out of passes: its last backward follows n slices down the pipeline and
    # p - 1 stages back up, whatever the order. At equal times, the schedule is as short as this allows.
    equal = timeline("seq-zb-h1", p, m, n, (1.0, 1.0, 1.0))
    least = ((n + p - 1) + (p - 1)) / n - m
    assert idle_ms(equal, (1.0, 1.0, 1.0)) == pytest.approx(max((p - 1) / n, least), abs=1e-9 * equal.makespan_ms)
    assert idle_ms(found) > exact - 1e-9


@pytest.mark.parametrize(("p", "m", "n"), [size for size in SIZES if size[2] % size[0] == 0])
def test_seq_interleaved_has_the_bubble_and_peak_of_its_formulas(p: int, m: int, n: int) -> None:
    found = timeline("seq-interleaved-1f1b", p, m, n)
    assert idle_ms(found) == pytest.approx((p - 1) * (F + B + W) / (2 * n), abs=1e-9 * found.makespan_ms)
    assert max(found.peak_activation) == pytest.approx(min(m, 1 + 2 * (p - 1) / (2 * n)), abs=1e-9)


def test_eight_slices_of_eight_microbatches_on_eight_ranks() -> None:
    found = timeline("seq-zb-h1", 8, 8, 8, (1.0, 1.0, 1.0))
    assert found.bubble_rate("makespan") <= 0.036
    assert max(found.peak_activation) / 8 <= 0.24


def test_no_number_of_slices_and_chunks_deadlocks() -> None:
    for p, m, n, v in product(range(1, 6), range(1, 4), range(1, 10), (2, 3)):
        schedule = build("seq-interleaved-1f1b", num_ranks=p, num_microbatches=m, num_slices=n, num_chunks=v)
        simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0))


def test_one_slice_gives_the_orders_of_microbatches() -> None:
    for p, m in product(range(1, 6), (1, 3, 5, 9)):
        size = {"num_ranks": p, "num_microbatches": m}
        for sliced, plain in (
            ("seq-1f1b", "1f1b"),
            ("seq-zb-h1", "zb-h1"),
            ("seq-interleaved-1f1b", "interleaved-1f1b"),
        ):
            assert build(sliced, **size, num_slices=1).order == build(plain, **size).order


@given(
    name=st.sampled_from(["seq-1f1b", "seq-zb-h1", "seq-interleaved-1f1b"]),
    p=st.integers(1, 6),
    m=st.integers(1, 5),
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=7),
)
def test_every_size_and_cut_is_valid(name: str, p: int, m: int, parts: list[int]) -> None:
    slices = Slices(tuple(part / sum(parts) for part in parts))
    schedule = build(name, num_ranks=p, num_microbatches=m, num_slices=slices)
    validate(schedule)
    costs = PassCosts.uniform(schedule.placement, F, B, W, attention=0.5)
    found = simulate(schedule, costs, PassMemory.uniform(schedule.placement))
    assert max(found.peak_activation) <= m + 1e-9


def test_other_schedules_refuse_slices() -> None:
    with pytest.raises(UserError, match=r"schedule 'zb-v' does not cut sequences into slices; got 2 slices; use one"):
        build("zb-v", num_ranks=2, num_microbatches=2, num_slices=2)

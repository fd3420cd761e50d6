"""Recomputation as passes (R): where they go, and what they gain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble.core.analysis.memory import peaks_in_order
from megatron.zero_bubble.core.analysis.orders import outcomes
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.validate import ScheduleError, validate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Kind, Placement, Schedule, Slices
from megatron.zero_bubble.core.plan import plan_of
from megatron.zero_bubble.core.schedules import SCHEDULES, build
from megatron.zero_bubble.core.search.recompute import with_recomputation

WHOLE = sorted(name for name, recipe in SCHEDULES.items() if not recipe.sliced)


def costs_on(placement: Placement) -> PassCosts:
    """F, R, B and W take one each on a rank; B alone includes its R."""
    costs = PassCosts.uniform(placement, 1, 2, 1)
    return replace(costs, recompute_ms=costs.forward_ms)


def makespan(schedule: Schedule) -> float:
    return simulate(schedule, costs_on(schedule.placement)).makespan_ms


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_closed_forms(p: int, m: int) -> None:
    """With F = R = B = W: the bubble of 1F1B loses p-1 R, and that of ZB-H1, too."""
    plain, split = (build(name, num_ranks=p, num_microbatches=m) for name in ("1f1b", "zb-h1"))
    assert [makespan(each) for each in (plain, with_recomputation(plain))] == [4 * (m + p - 1), 4 * m + 3 * (p - 1)]
    assert [makespan(each) for each in (split, with_recomputation(split))] == [4 * m + 2 * (p - 1), 4 * m + p - 1]


@given(
    st.sampled_from(WHOLE),
    st.integers(2, 4),
    st.integers(1, 2),
    st.sets(st.integers(0, 3)),
)
def test_any_stages_of_any_schedule(name: str, p: int, per_rank: int, stages: set[int]) -> None:
    schedule = build(name, num_ranks=p, num_microbatches=per_rank * p)
    apart = with_recomputation(schedule, stages)
    validate(apart)
    plan_of(apart)
    assert makespan(apart) <= makespan(schedule) + 1e-9
    done = {(p.stage, p.microbatch) for p in apart.passes() if p.kind is Kind.R}
    assert done == {(stage, m) for stage in stages if stage < apart.num_stages for m in range(per_rank * p)}
    assert Schedule.from_text(name, apart.placement, per_rank * p, apart.to_text()).order == apart.order
    if apart.num_microbatches and not apart.overlaps:
        (fast,) = outcomes([apart], costs_on(apart.placement), PassMemory.uniform(apart.placement))
        assert fast.makespan_ms == makespan(apart)


def test_slices_compute_their_own_tokens_again() -> None:
    schedule = build("seq-zb-h1", num_ranks=2, num_microbatches=3, num_slices=Slices.even(4))
    apart = with_recomputation(schedule)
    validate(apart)
    plan_of(apart)
    costs = costs_on(apart.placement)
    whole, own = (simulate(each, costs) for each in (schedule, apart))
    assert own.busy_ms == pytest.approx(whole.busy_ms)


def test_memory_from_r_to_b() -> None:
    """Of one rank: F keeps 1, R adds 3, B leaves 2 for W."""
    on = Placement.linear(1)
    memory = PassMemory((1.0,), (2.0,), rebuilt=(3.0,))
    orders = {
        ("0F0", "0R0", "0B0", "0W0"): 4.0,
        ("0F0", "0B0", "0W0"): 2.0,
        ("0F0", "0F1", "0R0", "0B0", "0R1", "0B1", "0W0", "0W1"): 6.0,
    }
    for order, peak in orders.items():
        schedule = Schedule.from_text("given", on, 1 + ("0F1" in order), [order])
        validate(schedule)
        assert peaks_in_order(schedule, memory) == (peak,)
        assert simulate(schedule, costs_on(on), memory).peak_activation == (peak,)


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (("0F0", "0B0", "0R0", "0W0"), "0B0"),
        (("0R0", "0F0", "0B0", "0W0"), "0R0"),
        (("0F0", "0R0", "0R0", "0B0", "0W0"), "0R0 must run once"),
        (("0F0", "0R0", "0W0"), "rank 0 must run 0B0"),
    ],
)
def test_invalid_orders(order: tuple[str, ...], why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        validate(Schedule.from_text("given", Placement.linear(1), 1, [order]))


def test_an_evaluation_computes_nothing_again() -> None:
    forwards = with_recomputation(build("zb-h1", num_ranks=2, num_microbatches=2)).forward_only()
    validate(forwards, forward_only=True)
    assert {p.kind for p in forwards.passes()} == {Kind.F}

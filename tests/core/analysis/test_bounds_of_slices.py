"""No schedule of sequence slices is below its bound, and some reach it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, PassMemory, build, simulate
from megatron.zero_bubble.core.analysis.bounds import lower_bound
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.ir.workload import Workload
from tests.helpers.gpipe import gpipe
from tests.helpers.strategies import costs_for, cuts, num_ranks

SEQUENTIAL = "gpipe"


@settings(max_examples=25)
@given(
    st.data(),
    st.sampled_from(["seq-1f1b", "seq-zb-h1", "seq-interleaved-1f1b", SEQUENTIAL]),
    num_ranks,
    st.integers(1, 5),
)
def test_no_schedule_is_below_its_bound(data: st.DataObject, name: str, p: int, m: int) -> None:
    slices = data.draw(cuts)
    if name == SEQUENTIAL:
        schedule = gpipe(build("zb-v", num_ranks=p, num_microbatches=1).placement, m, len(slices))
    else:
        schedule = build(name, num_ranks=p, num_microbatches=m, num_slices=slices)
    costs = data.draw(costs_for(schedule))
    memory = PassMemory((1.0,) * schedule.num_stages, (0.5,) * schedule.num_stages)
    timeline = simulate(schedule, costs, memory)
    figures = (costs, memory, Workload.of(schedule), most_kept(timeline, memory))
    for fused in {False, "1f1b" in name}:
        span = lower_bound(*figures, "span", fused)
        assert span.value_ms <= timeline.span_ms * (1 + 1e-9), span
        makespan = lower_bound(*figures, "makespan", fused)
        assert makespan.value_ms <= timeline.makespan_ms * (1 + 1e-9), makespan


@pytest.mark.parametrize(("p", "m", "n"), [(2, 1, 4), (4, 4, 4), (8, 8, 8), (8, 1, 4), (4, 12, 2)])
def test_seq_zb_h1_is_optimal_at_equal_passes(p: int, m: int, n: int) -> None:
    schedule = build("seq-zb-h1", num_ranks=p, num_microbatches=m, num_slices=n)
    costs, memory = PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0), PassMemory.uniform(schedule.placement)
    timeline = simulate(schedule, costs, memory)
    found = lower_bound(costs, memory, Workload(schedule.placement, m, schedule.slices), None, "makespan")
    assert found.value_ms == pytest.approx(timeline.makespan_ms)


@pytest.mark.parametrize(
    ("costs", "ms"),
    [
        # The work of the slow second rank, between an F on the first rank and a B and a W there.
        (PassCosts((1.0, 10.0), (1.0, 10.0), (1.0, 0.0)), 0.5 + 20.0 + 0.5 + 0.5),
        # The transfers there and back delay the first backward of the first rank.
        (PassCosts((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), 3.0), 0.5 + 3.0 + 1.0 + 0.5 + 3.0 + 2.0),
    ],
)
def test_unequal_passes_and_transfers_reach_the_bound(costs: PassCosts, ms: float) -> None:
    schedule = build("seq-zb-h1", num_ranks=2, num_microbatches=1, num_slices=2)
    memory = PassMemory.uniform(schedule.placement)
    assert simulate(schedule, costs, memory).makespan_ms == pytest.approx(ms)
    found = lower_bound(costs, memory, Workload(schedule.placement, 1, schedule.slices), None, "makespan")
    assert found.value_ms == pytest.approx(ms)


def test_a_limit_raises_the_bound() -> None:
    schedule = build("seq-zb-h1", num_ranks=4, num_microbatches=4, num_slices=4)
    costs, memory = PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0), PassMemory.uniform(schedule.placement)
    tight, loose = (
        lower_bound(costs, memory, Workload(schedule.placement, 4, schedule.slices), limit).value_ms
        for limit in (1.0, 9.0)
    )
    assert tight > loose == pytest.approx(12.0)

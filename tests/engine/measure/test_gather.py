"""Costs derived from recorded iterations."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, Slices, build, simulate
from megatron.zero_bubble.core.analysis.timeline import Span, Timeline
from megatron.zero_bubble.core.costs.lengths import LengthCost, Load
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.ir import Kind
from megatron.zero_bubble.core.ir.shards import Gather
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.plan.shard import Sharding
from megatron.zero_bubble.core.search.vocabulary import with_vocabulary
from megatron.zero_bubble.engine.measure.gather import attention_share, median_costs
from megatron.zero_bubble.planning.source import fused_but_last
from tests.helpers.strategies import costs_for, cuts

LATER = (Kind.T, Kind.BW, Kind.J)


@given(st.data())
def test_costs_of_a_run_are_those_that_it_was_simulated_with(data: st.DataObject) -> None:
    slices = data.draw(cuts)
    schedule = build("seq-zb-h1", num_ranks=3, num_microbatches=2, num_slices=slices)
    costs = data.draw(costs_for(schedule))
    found = median_costs([simulate(schedule, costs)])
    assert found.forward_ms == pytest.approx(costs.forward_ms)
    assert found.backward_ms == pytest.approx(costs.backward_ms)
    assert found.wgrad_ms == pytest.approx(costs.wgrad_ms)
    if len(slices) > 1:
        assert found.forward_attention == pytest.approx(costs.forward_attention, abs=1e-6)
        assert found.backward_attention == pytest.approx(costs.backward_attention, abs=1e-6)
    else:
        assert found.forward_attention == (0.0,) * 3, "one slice says nothing about attention"


def test_share_of_attention_is_between_0_and_1() -> None:
    assert attention_share([9.0, 1.0], Slices.even(2)) == 0.0
    assert attention_share([0.0, 9.0], Slices.even(2)) == 1.0
    assert attention_share([1.0, 3.0], Slices.even(2)) == pytest.approx(1.0)
    assert attention_share([5.0, 7.0], Slices.even(2)) == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["zb-v", "1f1b"])
def test_costs_of_packed_microbatches_are_those_of_a_whole_sequence(name: str) -> None:
    """Whatever the lengths of the samples, and although they differ between iterations."""
    cost = LengthCost.of_share(0.3, 4096)
    lists = [[[4096], [500, 300], [64], [1000, 2000, 7]], [[100], [200], [300], [4000, 90]]]
    timelines = []
    for lengths in lists:
        loads = tuple(map(Load.of, lengths))
        schedule = build(name, num_ranks=2, num_microbatches=len(loads))
        timelines.append(replace(simulate(schedule, cost.passes(schedule.placement, loads)), loads=loads))
    found = median_costs(timelines, whole=cost.whole(4096))
    stages = schedule.num_stages
    third = 2 / stages / 3
    assert found.forward_ms == pytest.approx((third,) * stages)
    backward, wgrad = (third * 1.3, third * 0.7) if name == "zb-v" else (third * 2, 0.0)
    assert found.backward_ms == pytest.approx((backward,) * stages)
    assert found.wgrad_ms == pytest.approx((wgrad,) * stages)
    assert found.forward_attention == pytest.approx((0.3,) * stages)
    assert found.backward_attention == pytest.approx((0.6 / 1.3,) * stages)


def test_fused_backwards_count_as_b() -> None:
    schedule = build("seq-1f1b", num_ranks=2, num_microbatches=2, num_slices=2)
    found = median_costs([simulate(schedule, PassCosts((1.0,) * 2, (2.0,) * 2, (3.0,) * 2))])
    assert (found.backward_ms, found.wgrad_ms) == ((5.0, 5.0), (0.0, 0.0))


def test_fused_backwards_of_a_stage_that_splits_others_do_not_count() -> None:
    costs = PassCosts((1.0,) * 2, (2.0, 4.0), (3.0, 5.0))
    timeline = simulate(fused_but_last(build("zb-h1", num_ranks=2, num_microbatches=4)), costs)
    found = median_costs([timeline])
    assert (found.backward_ms, found.wgrad_ms) == (costs.backward_ms, costs.wgrad_ms)


def test_fused_backwards_are_divided_as_measured_before() -> None:
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=2), PassCosts((1.0,) * 2, (2.0,) * 2, (3.0,) * 2))
    found = median_costs([timeline], PassCosts((9.0,) * 2, (3.0, 3.0), (1.0, 0.0)))
    assert (found.backward_ms, found.wgrad_ms) == ((3.75, 5.0), (1.25, 0.0))


@pytest.mark.parametrize("algorithm", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_costs_of_shards_are_those_that_they_were_simulated_with(name: str, algorithm: Algorithm) -> None:
    """The recorded costs then predict the iteration."""
    schedule = build(name, num_ranks=3, num_microbatches=6)
    costs = PassCosts.uniform(schedule.placement, 5.0, 6.0, 4.0, comm_ms=0.5)
    shards = VocabularyCosts((3.0, 2.0, 2.5), (1.0, 2.0, 1.5), (0.3, 0.2, 0.1), (0.4, 0.5, 0.6), collective_ms=0.7)
    costs = replace(costs, vocabulary=shards)
    timeline = simulate(with_vocabulary(schedule, costs, algorithm, delay=True), costs)
    found = median_costs([timeline])
    assert found.vocabulary is not None
    for key in ("output_ms", "output_wgrad_ms", "embedding_ms", "embedding_wgrad_ms"):
        assert getattr(found.vocabulary, key) == pytest.approx(getattr(shards, key))
    assert found.vocabulary.collective_ms == pytest.approx(0.7)
    assert found.comm_ms == pytest.approx(0.5)
    fused = name == "1f1b"
    assert found.wgrad_ms == pytest.approx((0.0,) * 3 if fused else costs.wgrad_ms)
    assert simulate(timeline.schedule, found).makespan_ms == pytest.approx(timeline.makespan_ms)


def test_time_of_the_loss_function_is_part_of_its_collective() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=1)
    costs = replace(PassCosts.uniform(schedule.placement, 1, 1, 1), vocabulary=VocabularyCosts((2, 1), (1, 1)))
    timeline = simulate(with_vocabulary(schedule, costs, 2), costs)
    later = [
        tuple(Span(p, start + 3 * (p.kind in LATER), end + 3 * (p.kind in (Kind.L, *LATER))) for p, start, end in row)
        for row in timeline.spans
    ]
    assert any(span.pass_.kind is Kind.L and span.end_ms - span.start_ms == 3 for row in later for span in row)
    found = median_costs([Timeline(timeline.schedule, tuple(later))])
    assert found.vocabulary is not None
    assert found.vocabulary.collective_ms == pytest.approx(1.5), "one for S takes no time, and one for L takes 3 ms"


def test_costs_have_the_times_of_gathers_and_reductions() -> None:
    """What begins before the first pass does not count: a stage that is gathered only then is taken to be like the
    others.
    """
    schedule = build("zero-pp", num_ranks=2, num_microbatches=8, num_chunks=3)
    costs = PassCosts.uniform(schedule.placement, 5.0, 6.0, 4.0)
    costs = replace(costs, gather_ms=(3.0, 1.0, 1.0, 2.0, 2.0, 2.5), reduce_ms=(0.5, 0.75, 1.0, 1.25, 1.5, 1.75))
    timeline = simulate(plan_of(schedule, Additions(sharding=Sharding(1, 1))), costs)
    assert median_costs([timeline]).gather_ms == pytest.approx(costs.gather_ms)
    assert median_costs([timeline]).reduce_ms == pytest.approx(costs.reduce_ms)

    def gather_ms(stages: Collection[int]) -> tuple[float, ...]:
        """What is found if all gathers of these stages begin before the first pass, and end soon after."""
        early = tuple(
            tuple(
                span._replace(start_ms=0.0, end_ms=0.25)
                if isinstance(span.op, Gather) and span.op.stage in stages
                else span
                for span in row
            )
            for row in timeline.lanes
        )
        return median_costs([replace(timeline, lanes=early)]).gather_ms

    assert gather_ms([0]) == pytest.approx((2.0, *costs.gather_ms[1:]))
    assert not any(gather_ms(range(6)))


def test_passes_of_pairs_do_not_count_where_others_ran_alone() -> None:
    """The passes of a pair take the time of both; the warm-up and the cool-down have the times of single passes."""
    schedule = build("interleaved-1f1b", num_ranks=2, num_microbatches=8, pairs=True)
    costs = PassCosts.uniform(schedule.placement, 5.0, 2.0, 4.0, 0.5)
    found = median_costs([simulate(schedule, costs)], costs)
    assert (found.forward_ms, found.backward_ms, found.wgrad_ms) == (
        pytest.approx(costs.forward_ms),
        pytest.approx(costs.backward_ms),
        pytest.approx(costs.wgrad_ms),
    )
    assert found.comm_ms == pytest.approx(0.5)

"""Lower bounds with vocabulary parallelism."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, PassMemory, Placement, build, simulate
from megatron.zero_bubble.core.analysis.bounds import lower_bound
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search.vocabulary import with_vocabulary
from tests.helpers.strategies import costs_for

FIGURES = st.floats(0.0, 3.0)
NAMES = ["1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "interleaved-1f1b"]


@settings(max_examples=25)
@given(
    data=st.data(),
    name=st.sampled_from(NAMES),
    p=st.integers(1, 3),
    m=st.integers(1, 6),
    algorithm=st.sampled_from([1, 2]),
    lag=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_no_inserted_schedule_is_shorter(
    data: st.DataObject, name: str, p: int, m: int, algorithm: Algorithm, lag: float
) -> None:
    schedule = build(name, num_ranks=p, num_microbatches=m)
    times = [tuple(data.draw(st.lists(FIGURES, min_size=p, max_size=p))) for _ in range(4)]
    vocabulary = VocabularyCosts(*times, collective_ms=data.draw(FIGURES))
    costs = replace(data.draw(costs_for(schedule)), vocabulary=vocabulary)
    memory = PassMemory.uniform(schedule.placement)
    for delay in (False, True) if schedule.num_stages == p else (True,):
        timeline = simulate(with_vocabulary(schedule, costs, algorithm, lag, delay), costs, memory)
        limit = most_kept(timeline, memory)
        for objective, ms in (("span", timeline.span_ms), ("makespan", timeline.makespan_ms)):
            bound = lower_bound(costs, memory, Workload(schedule.placement, m, vocabulary=algorithm), limit, objective)
            assert bound.value_ms <= ms * (1 + 1e-9)


@pytest.mark.parametrize("algorithm, ms", [(1, 8.0), (2, 7.0)])
def test_a_microbatch_alone_waits_for_every_barrier(algorithm: Algorithm, ms: float) -> None:
    """Rank 0 of two works for 6 ms, and waits for F of the other rank; then for its B, while T can run if it need not
    have ended.
    """
    placement = Placement.linear(2)
    costs = replace(PassCosts.uniform(placement, 1.0, 1.0, 1.0), vocabulary=VocabularyCosts((1.5, 0.0), (1.5, 0.0)))
    memory = PassMemory.uniform(placement)
    bound = lower_bound(costs, memory, Workload(placement, 1, vocabulary=algorithm), None)
    assert (bound.value_ms, bound.rank) == (ms, 0)
    made = with_vocabulary(build("zb-h1", num_ranks=2, num_microbatches=1), costs, algorithm)
    assert simulate(made, costs).span_ms == ms


@pytest.mark.parametrize(
    ("algorithm", "objective", "ms"),
    [(1, "span", 24.0), (1, "makespan", 24.0), (2, "span", 20.0), (2, "makespan", 20.75)],
)
def test_ranks_wait_for_the_slowest_shard(algorithm: Algorithm, objective: Metric, ms: float) -> None:
    """I of rank 1 for the only microbatch, from 0.75 to 3.75 ms, F of both ranks to 6.75 ms, and S of rank 1 to 11.75
    ms. With algorithm 1, its T, B of both ranks, W and J of rank 0 follow; with algorithm 2, T, B and W of rank 1 do. A
    step to another rank takes a transfer of 0.25 ms, for the vocabulary a collective of 0.5 ms as well.
    """
    placement = Placement.linear(2)
    figures = VocabularyCosts((0.0, 5.0), (0.0, 7.0), (0.0, 3.0), (2.0, 0.0), collective_ms=0.5)
    costs = replace(PassCosts.uniform(placement, 1.0, 1.0, 1.0, comm_ms=0.25), vocabulary=figures)
    bound = lower_bound(
        costs, PassMemory.uniform(placement), Workload(placement, 1, vocabulary=algorithm), None, objective
    )
    assert bound.value_ms == pytest.approx(ms)


def test_work_of_the_vocabulary_counts() -> None:
    placement = Placement.linear(2)
    costs = replace(PassCosts.uniform(placement, 1.0, 1.0, 1.0), vocabulary=VocabularyCosts.uniform(2, 0.5, 0.25))
    bound = lower_bound(costs, PassMemory.uniform(placement), Workload(placement, 100, vocabulary=2), None)
    assert bound.value_ms >= 375.0

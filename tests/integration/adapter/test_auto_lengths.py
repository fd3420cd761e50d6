"""``zb-auto`` with microbatches of different lengths: it plans for every number of them, and changes no bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.core.costs.lengths import LengthCost, Load
from megatron.zero_bubble.engine.measure.gather import median_costs
from megatron.zero_bubble.planning.setup import Searched, Setup
from tests.helpers.ranks import RankPool
from tests.integration.adapter.test_auto import sizes_planned_for, waiting_for_plans
from tests.loops.varied import KINDS, ONE_STAGE, Loop, Outcome, Run, differences, train

COUNTS = (5, 3, 5, 3, 5, 3, 3, 5, 5)
"""Two to warm up and four to measure, of several sizes; then each number is planned where it occurs, and runs."""
DEFAULT = ("dense", "nobody", 1)


def outcomes(rank: int, runs: Sequence[Run]) -> tuple[list[Outcome], list[str]]:
    """Train with every schedule, in turn; also return what the planners said on this rank."""
    with waiting_for_plans() as said:
        return [train(rank, *run) for run in runs], said


@pytest.mark.parametrize(
    ("kind", "tells", "tensor"),
    [
        pytest.param(*row, marks=() if row == DEFAULT else pytest.mark.full)
        for row in (*product(KINDS, ("nobody", "all"), (1,)), ("packed", "nobody", 2))
    ],
)
def test_plans_change_no_bit(ranks: RankPool, kind: str, tells: str, tensor: int) -> None:
    runs: list[Run] = [(name, ONE_STAGE, Loop(kind, COUNTS, tells, tensor)) for name in (None, "zb-auto")]
    results = ranks.run(2 * tensor, outcomes, runs, timeout=200)
    stock, ours = zip(*(found for found, _ in results), strict=True)
    assert differences(stock, ours) == []
    first, *others = (said for _, said in results)
    assert first == ["switched to the planned schedule: zb-auto, 1 slices"] * 2, "one per number of microbatches"
    assert not any(others), "only the first rank plans"


def planned_on_replicas(rank: int, sizes: Sequence[Sequence[int]], limit: str = "1p", experts: int = 1) -> list[int]:
    """The numbers of microbatches that this rank starts planners for, on two replicas with their own sizes."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, expert_model_parallel_size=experts, create_gloo_process_groups=False
    )
    try:
        own, group = sizes[parallel_state.get_data_parallel_rank()], parallel_state.get_pipeline_model_parallel_group()
        return sizes_planned_for(rank, list(own), [], group, {"measured": 2, "setup": Setup(Searched(limit=limit))})
    finally:
        parallel_state.destroy_model_parallel()


def test_every_replica_plans_for_its_own_numbers_of_microbatches(ranks: RankPool) -> None:
    """Replicas meet in nothing of this, so none waits for another; ranks 0 and 2 have stage 0 and 1 of a replica."""
    planned = ranks.run(4, planned_on_replicas, [[4, 6, 6, 4, 4], [5, 5, 7, 9, 7]])
    assert planned == [[6, 4], [5, 7, 9], [], []]


def test_replicas_that_share_experts_plan_together(ranks: RankPool) -> None:
    """Their passes exchange tokens, so that they need the same order."""
    assert ranks.run(4, planned_on_replicas, [[4, 6, 6, 4, 4]] * 2, "1p", 2) == [[6, 4], [], [], []]


def test_a_limit_in_bytes_is_refused(ranks: RankPool) -> None:
    """A plan counts microbatches, which have no common size."""
    with pytest.raises(Exception, match="a memory limit in bytes needs microbatches of equal length"):
        ranks.run(4, planned_on_replicas, [[4], [4]], "60GiB")


def test_costs_are_those_of_the_mean_microbatch() -> None:
    """Iterations of other lengths, and other numbers of microbatches, have the same proportions."""
    timelines = []
    for tokens in ([100, 300, 200], [50, 150], [1000, 2000, 3000, 2000]):
        schedule = build("zb-h1", num_ranks=2, num_microbatches=len(tokens))
        costs = LengthCost(linear=3.0).passes(schedule.placement, tuple(Load.of([each]) for each in tokens))
        timelines.append(simulate(schedule, costs))
    found = median_costs(timelines, varies=True)
    assert found.forward_ms == found.backward_ms == found.wgrad_ms == pytest.approx((200.0, 200.0))
    assert isinstance(found, PassCosts) and found.comm_ms == 0.0


def test_a_fused_backward_is_compared_with_its_own_forward() -> None:
    """The backward of a short microbatch is not taken for that of the mean one."""
    schedule = build("1f1b", num_ranks=1, num_microbatches=2)
    order = tuple(p for p in schedule.order[0])
    assert [str(p) for p in order] == ["0F0", "0BW0", "0F1", "0BW1"]
    costs = LengthCost(linear=3.0).passes(schedule.placement, (Load.of([100]), Load.of([300])))
    found = median_costs([simulate(schedule, costs)], varies=True)
    assert (found.forward_ms, found.backward_ms, found.wgrad_ms) == ((200.0,), (400.0,), (0.0,))

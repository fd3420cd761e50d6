"""The comparison of replicas: it starts without a wait, and its answer comes before a new plan, or with the passes."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.shards import Gather, ReleaseWeights
from megatron.zero_bubble.core.plan.shard import Sharding
from megatron.zero_bubble.engine.platforms.streams import ThreadLane
from megatron.zero_bubble.engine.runtime.shards import Sharder
from tests.helpers.ranks import RankFailure, RankPool

AGREE, WITH_THE_PASSES = [(4, False)] * 2, "with the passes"


class Alone:
    """A chunk that needs no other replica, so that a gather never waits."""

    def __init__(self) -> None:
        self.weights, self.gradients = [torch.ones(4)], [torch.zeros(4)]
        self.own_weights, self.own_gradients = [self.weights[0][:2]], [self.gradients[0][:2]]

    def gather(self) -> None: ...

    def reduce(self) -> None: ...


def call(num_microbatches: int, forward_only: bool) -> Any:
    return SimpleNamespace(step=SimpleNamespace(num_microbatches=num_microbatches, forward_only=forward_only))


def compare(rank: int, iterations: list[tuple[int, bool]], backend: str, read: str) -> str:
    """Begin an iteration on two replicas, of which the second begins when the first has started to compare.

    Returns what the second replica waited for.
    """
    from megatron.core import parallel_state

    from megatron.zero_bubble.integration.adapter import shards

    world: Any = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "get_data_parallel_group", lambda with_context_parallel: world)
        patch.setattr(shards, "backend_of", lambda _group: backend)
        units = shards.ShardedUnits(lambda _ranks: Sharding(4), shards.Collectives())
        units.begin(call(4, False))  # makes the group, together
        units.agree()
        units.sharder = Sharder(ThreadLane())
        units._optimizer = SimpleNamespace()  # also evaluations are sharded
        by_op = units.handlers(SimpleNamespace(observer=None))  # type: ignore[arg-type]
        if rank == 1:
            dist.recv(torch.zeros(1), 0)  # the first replica has begun, and queued its passes if the answer can wait
        with units.sharder.iteration({0: Alone()}):
            units.begin(call(*iterations[rank]))
            if read == WITH_THE_PASSES:
                (weights,) = by_op[Gather](Gather(0, 0), ())
                weights.wait("pass")
            if rank == 0:
                dist.send(torch.zeros(1), 1)
            if read == WITH_THE_PASSES:
                by_op[ReleaseWeights](ReleaseWeights(0, 0), ())
            else:
                units.agree()
                units.agree()  # once read, it costs nothing
        units.close()
    return "done"


@pytest.mark.parametrize("read", [WITH_THE_PASSES, "before a new plan"])
def test_comparison_waits_for_no_replica_before_it_is_read(ranks: RankPool, read: str) -> None:
    assert ranks.run(2, compare, AGREE, "nccl", read, timeout=30) == ["done"] * 2


@pytest.mark.parametrize("read", [WITH_THE_PASSES, "before a new plan"])
@pytest.mark.parametrize(
    ("iterations", "got"),
    [([(4, False), (2, False)], "got 4, 2;"), ([(4, False), (4, True)], r"got 4, 4 \(evaluation")],
)
def test_different_iterations_are_refused_on_every_replica(
    ranks: RankPool, iterations: list[tuple[int, bool]], got: str, read: str
) -> None:
    with pytest.raises(RankFailure, match=got) as caught:
        ranks.run(2, compare, iterations, "nccl", read, timeout=30)
    assert len(caught.value.reports) == 2
    assert all("must run the same number of microbatches" in report for report in caught.value.reports.values())


def over_gloo(rank: int) -> str:
    """The first gather would wait for a replica that has made another plan: the answer comes before it."""
    from megatron.core import parallel_state

    from megatron.zero_bubble.integration.adapter import shards

    world: Any = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "get_data_parallel_group", lambda with_context_parallel: world)
        units = shards.ShardedUnits(lambda _ranks: Sharding(4), shards.Collectives())
        with pytest.raises(UserError, match="must run the same number of microbatches"):
            units.begin(call(4 + rank, False))
        units.close()
    return "refused"


def test_over_gloo_the_answer_comes_before_the_first_gather(ranks: RankPool) -> None:
    assert ranks.run(2, over_gloo, timeout=30) == ["refused"] * 2


def lose_a_replica(rank: int) -> None:
    from megatron.zero_bubble.integration.adapter.replicas import ReplicaComparison

    world: Any = dist.group.WORLD
    comparison = ReplicaComparison(world)
    comparison.start(4, False)
    comparison.check()
    if rank == 1:
        os._exit(1)
    comparison.start(4, False)
    comparison.check()


def test_lost_replica_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, lose_a_replica, timeout=30, grace=5.0)
    assert "PeerError: not all data-parallel replicas began the iteration" in caught.value.reports[0]

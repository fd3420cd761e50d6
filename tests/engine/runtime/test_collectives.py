"""Collectives between ranks, under the executor: sums and broadcasts arrive, also when ranks stop or die."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble import Kind, Pass, PassCosts, build
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.errors import PeerError
from megatron.zero_bubble.core.ir import Plan, Value
from megatron.zero_bubble.core.ir.collectives import Collective, Sum
from megatron.zero_bubble.core.ir.vocabulary import PART, Algorithm
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.search.vocabulary import with_vocabulary
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.platforms.streams import ThreadLane
from megatron.zero_bubble.engine.runtime.collectives import (
    CollectiveResult,
    Lanes,
    Transfer,
    collective_handlers,
    collective_kinds,
)
from megatron.zero_bubble.engine.runtime.executor import Executor
from megatron.zero_bubble.engine.runtime.groups import Directions
from megatron.zero_bubble.engine.runtime.handler import FORGOTTEN, Awaited
from megatron.zero_bubble.engine.runtime.handlers import handlers
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers.ranks import RankPool

RANKS, MICROBATCHES = 3, 5


def plan_with_vocabulary(name: str, algorithm: Algorithm, post_validation: bool = False) -> Plan:
    schedule = build(name, num_ranks=RANKS, num_microbatches=MICROBATCHES)
    costs = PassCosts.uniform(schedule.placement, 3.0, 3.0, 2.0, 0.1)
    costs = replace(costs, vocabulary=VocabularyCosts.uniform(RANKS, 1.0, 1.0))
    schedule = with_vocabulary(schedule, costs, algorithm, 0.5, delay=schedule.num_stages > RANKS)
    return plan_of(schedule, Additions(post_validation=post_validation))


class Numbers:
    """Values are tensors of one number."""

    def spread(self, value: Value, held: Any, root: int) -> Transfer:
        assert not torch.is_grad_enabled()
        number = held.clone() if isinstance(held, torch.Tensor) else torch.zeros(1)

        def run(group: dist.ProcessGroup) -> None:
            assert not torch.is_grad_enabled()
            dist.broadcast(number, group=group, group_src=root)

        return Transfer(run, (number,), lambda: number)

    def gather(self, kind: Kind, microbatch: int, part: Any) -> tuple[Transfer, Any]:
        assert not torch.is_grad_enabled()
        number = torch.zeros(1) if part is FORGOTTEN else part.clone()
        every = torch.zeros(RANKS)
        return Transfer(lambda group: dist.all_gather_into_tensor(every, number, group=group), (every,)), (
            number,
            every,
        )

    def total(self, kind: Kind, microbatch: int, part: Any, root: int, is_root: bool) -> Transfer:
        assert not torch.is_grad_enabled()
        number, every = part if isinstance(part, tuple) else (part, None)
        number = torch.zeros(1) if part is FORGOTTEN else number.clone()

        def run(group: dist.ProcessGroup) -> None:
            if every is not None:
                assert number in every, "what all ranks have gathered is there before their sum"
            dist.reduce(number, group=group, group_dst=root)

        return Transfer(run, (number,), lambda: number if is_root else None)


class Adding:
    """Every pass outputs one more than the sum of its inputs; a total is one input."""

    def __init__(self, plan: Plan, seen: dict[str, float]) -> None:
        self._flow, self._seen = plan.schedule.flow, seen

    def run(self, work: Pass, inputs: Sequence[Any]) -> list[torch.Tensor]:
        result = 1.0 + sum(float(number) for number in inputs if number is not None)
        self._seen[str(work)] = result
        return [torch.tensor([result])] * len(self._flow.outputs(work))


def expected(plan: Plan) -> dict[str, float]:
    flow, results = plan.schedule.flow, dict[Pass, float]()

    def result(p: Pass) -> float:
        if p not in results:
            results[p] = 1 + sum(result(value.producer) for value in flow.inputs(p))
        return results[p]

    return {str(p): result(p) for p in plan.schedule.passes()}


def run(rank: int, plan: Plan, rejected: int, make_lanes: type[Lanes] = Lanes) -> dict[str, float]:
    """Run the plan until it is not rejected; return the outputs of this rank's passes."""
    assert dist.group.WORLD is not None
    lanes = make_lanes(dist.group.WORLD, select("cpu").lane, None)
    lanes.open(collective_kinds(plan))
    transport = Transport(Directions.of(dist.group.WORLD), plan.channels)
    answers = [False] * rejected + [True]
    while True:
        seen: dict[str, float] = {}
        stages = dict.fromkeys(plan.schedule.placement.stages_of(rank), Adding(plan, seen))
        by_op = handlers(stages, transport, lambda _message: torch.empty(1), None, lambda: answers.pop(0))
        if Executor(plan, rank, {**by_op, **collective_handlers(plan, lanes, Numbers())}).run():
            break
    lanes.close()
    transport.close()
    return seen


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("algorithm", [1, 2])
@pytest.mark.parametrize("rejected", [0, 1])
def test_every_pass_gets_the_values_of_the_flow(
    ranks: RankPool, name: str, algorithm: Algorithm, rejected: int
) -> None:
    plan = plan_with_vocabulary(name, algorithm, post_validation=rejected > 0)
    found: dict[str, float] = {}
    for seen in ranks.run(RANKS, run, plan, rejected):
        found |= seen
    assert found == expected(plan)


def miss_one(rank: int) -> str:
    """Rank 1 does not give its part of a sum; return the error of this rank."""
    assert dist.group.WORLD is not None
    lanes, plan, said = (
        Lanes(dist.group.WORLD, select("cpu").lane, timedelta(seconds=2)),
        plan_with_vocabulary("zb-h1", 2),
        "",
    )
    lanes.open(collective_kinds(plan))
    part = next(op for op in plan.ops[rank] if isinstance(op, Sum) and op.value.producer.kind is Kind.S)
    if rank != 1:
        given = collective_handlers(plan, lanes, Numbers())[Sum](part, [torch.ones(1)])
        try:
            for awaited in given[:1]:
                awaited.wait(f"{rank}L0")
        except PeerError as error:
            said = str(error)
    dist.barrier()
    lanes.close()
    return said


def test_a_missing_rank_is_reported(ranks: RankPool) -> None:
    said = ranks.run(RANKS, miss_one)
    assert "pipeline rank 2 could not run 2L0: not all ranks took part in the collective for 0S0:part" in said[2]


def close_while_one_is_missing(rank: int) -> float:
    """Close the lanes while the collective of rank 0 waits for the others; return how long that took."""
    assert dist.group.WORLD is not None
    lanes, plan = Lanes(dist.group.WORLD, select("cpu").lane, None), plan_with_vocabulary("zb-h1", 2)
    lanes.open(collective_kinds(plan))
    part = next(op for op in plan.ops[rank] if isinstance(op, Sum) and op.value.producer.kind is Kind.S)
    begin_s = time.monotonic()
    if rank == part.root:
        collective_handlers(plan, lanes, Numbers())[Sum](part, [torch.ones(1)])
        lanes.close(timeout_s=0.5)
    took_s = time.monotonic() - begin_s
    dist.barrier()
    if rank != part.root:
        collective_handlers(plan, lanes, Numbers())[Sum](part, [torch.ones(1)])
        lanes.close()
    return took_s


def test_lanes_are_closed_although_a_rank_is_missing(ranks: RankPool) -> None:
    assert max(ranks.run(RANKS, close_while_one_is_missing)) < 10


def test_an_error_that_a_lane_keeps_keeps_no_values_of_the_passes() -> None:
    lane, part = ThreadLane(), next(op for op in plan_with_vocabulary("zb-h1", 2).ops[0] if isinstance(op, Sum))

    def fail() -> None:
        raise RuntimeError("Connection closed by peer")

    awaited = CollectiveResult(lane.start(fail, ()), part, lambda: None)

    def run_a_pass() -> weakref.ref[torch.Tensor]:
        value = torch.ones(1)
        with pytest.raises(PeerError):
            awaited.wait("a pass")
        return weakref.ref(value)

    value = run_a_pass()
    assert lane.close(10.0)
    assert value() is None


def test_parts_have_one_name() -> None:
    """The sum of S and the sum of T have different lanes, though their parts have the same name."""
    assert {f"net {kind}:{PART}" for kind in "SIT"} <= collective_kinds(plan_with_vocabulary("zb-h1", 1))


class HostJoins(Lanes):
    """Lanes whose host waits, as with NCCL, in the first collective of a group until all ranks take part."""

    joined: set[dist.ProcessGroup]

    def start(self, op: Collective, transfer: Transfer) -> Awaited:
        group = self._lanes[op.lane][1]
        if group not in self.joined:
            dist.barrier(group)
        self.joined.add(group)
        return super().start(op, transfer)


def run_with_hosts_that_join(rank: int, plan: Plan) -> dict[str, float]:
    """Run the plan where the first collective of a group blocks the host."""
    HostJoins.joined, reduce = set(), dist.ProcessGroup.allreduce

    def allreduce(group: dist.ProcessGroup, *arguments: Any) -> dist.Work:
        HostJoins.joined.add(group)
        return reduce(group, *arguments)

    with mock.patch.object(dist.ProcessGroup, "allreduce", allreduce):
        return run(rank, plan, 0, HostJoins)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("algorithm", [1, 2])
def test_no_host_waits_in_the_first_collective_of_a_kind(ranks: RankPool, name: str, algorithm: Algorithm) -> None:
    """Ranks start the kinds in different orders, so hosts that joined a group there would wait for each other."""
    plan = plan_with_vocabulary(name, algorithm)
    found: dict[str, float] = {}
    for seen in ranks.run(RANKS, run_with_hosts_that_join, plan, timeout=60):
        found |= seen
    assert found == expected(plan)

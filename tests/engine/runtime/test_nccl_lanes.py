"""Collectives of vocabulary parallelism alongside the messages of a plan, by NCCL's rules, on simulated GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.zero_bubble import Kind, Pass
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Plan, Value
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.core.plan import communicate, lower, plan_of, plan_of_evaluation, prove_for_queues
from megatron.zero_bubble.core.plan.collect import collect
from megatron.zero_bubble.engine.runtime import groups
from megatron.zero_bubble.engine.runtime.collectives import Lanes, Transfer, collective_handlers, collective_kinds
from megatron.zero_bubble.engine.runtime.executor import Executor
from megatron.zero_bubble.engine.runtime.groups import Directions
from megatron.zero_bubble.engine.runtime.handlers import handlers
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers import nccl
from tests.helpers.nccl import COMPUTE, Event, GPUs
from tests.helpers.rows import some
from tests.helpers.sources import named

NAMES = ("1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "interleaved-1f1b")
ALGORITHMS: tuple[Algorithm, ...] = (1, 2)


@dataclass
class StreamLane:
    """A lane on a stream of one GPU, as ``platforms.cuda.CudaLane``."""

    gpus: GPUs
    rank: int
    name: str

    def start(self, work: Callable[[], Any], _uses: Iterable[torch.Tensor]) -> StreamResult:
        self.gpus.wait((self.rank, self.name), self.gpus.record((self.rank, COMPUTE)))
        with self.gpus.stream(self.name):
            made = work()
        return StreamResult(self.gpus, self.rank, made, self.gpus.record((self.rank, self.name)))


@dataclass
class StreamResult:
    gpus: GPUs
    rank: int
    made: Any
    done: Event

    def wait(self) -> Any:
        self.gpus.wait((self.rank, COMPUTE), self.done)
        return self.made


class Transfers:
    """Collectives without values, which ``test_collectives`` checks, in as many transfers as those of a model."""

    def spread(self, _value: Value, _held: Any, root: int) -> Transfer:
        return Transfer(lambda group: group.broadcast(torch.zeros(1), root))

    def gather(self, _kind: Kind, _microbatch: int, part: Any) -> tuple[Transfer, Any]:
        return Transfer(lambda group: group.allgather([torch.zeros(1) for _ in group.ranks], torch.zeros(1))), part

    def total(self, kind: Kind, _microbatch: int, part: Any, root: int, _is_root: bool) -> Transfer:
        def run(group: Any) -> None:
            if kind is Kind.S:
                group.gpus.compute(group.own, lambda: None)  # scales the part
            group.broadcast(torch.zeros(1), root)  # a reduction takes the same ring

        return Transfer(run)


@dataclass
class Stage:
    """Passes whose kernels do nothing, after everything that they wait for."""

    plan: Plan
    gpus: GPUs
    rank: int

    def run(self, work: Pass, _inputs: Sequence[Any]) -> list[torch.Tensor]:
        self.gpus.compute(self.rank, lambda: None)
        return [torch.zeros(1) for _ in self.plan.schedule.flow.outputs(work)]


def ends(plan: Plan, **rules: Any) -> bool:
    """Whether no host and no GPU waits forever in an iteration that begins with new groups."""
    gpus = GPUs(plan.schedule.num_ranks, **rules)

    def host(pipeline: Any) -> None:
        rank = pipeline.rank()
        transport = Transport(Directions.of(pipeline), plan.channels)
        number = count()
        make: Any = lambda: StreamLane(gpus, rank, f"lane {next(number)}")  # noqa: E731
        lanes = Lanes(pipeline, make, None)
        lanes.open(collective_kinds(plan))
        stages = dict.fromkeys(range(plan.schedule.num_stages), Stage(plan, gpus, rank))
        by_op = handlers(stages, transport, lambda _message: torch.zeros(1))
        assert Executor(plan, rank, {**by_op, **collective_handlers(plan, lanes, Transfers())}).run()

    try:
        gpus.on_hosts(host)
    except threading.BrokenBarrierError:
        return False
    return gpus.run()


def plans(name: str, ranks: Iterable[int], counts: Callable[[int], Iterable[int]]) -> Iterator[tuple[str, Plan]]:
    """Yield the plans of a schedule with either algorithm, for training and evaluation, with what they are."""
    for p, algorithm in product(ranks, ALGORITHMS):
        for m in counts(p):
            schedule = named(name, p, vocabulary=algorithm).make(m)
            for lowering in (plan_of, plan_of_evaluation):
                yield f"{name} {p=} {m=} {algorithm=} {lowering.__name__}", lowering(schedule)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_no_rank_waits_forever(name: str, eager: bool) -> None:
    """Neither with communicators that are created lazily, nor with those that are created with their group."""
    assert [what for what, plan in plans(name, (2, 3), lambda p: (p,)) if not ends(plan, eager=eager)] == []


@pytest.mark.full
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_no_rank_of_any_plan_waits_forever(name: str, eager: bool) -> None:
    every = plans(name, (2, 3, 4), lambda p: (1, p, 2 * p + 1, 3 * p))
    assert [what for what, plan in every if not ends(plan, eager=eager)] == []


@pytest.mark.parametrize("name", some(NAMES, "interleaved-1f1b"))
def test_one_hardware_queue_suffices(name: str) -> None:
    """And so does any number of them, which the streams share."""
    for what, plan in plans(name, (2, 3), lambda p: (p, 2 * p + 1)):
        for num_queues in (1, 2, 8, 32):
            assert accepted(plan, num_queues), what
            assert ends(plan, num_queues=num_queues), what


@pytest.mark.parametrize("name", some(["interleaved-1f1b", "zb-v"], "zb-v"))
def test_plans_block_one_queue_where_the_proof_says_so(name: str) -> None:
    """Without the lowering pass that lets transfers take turns."""
    blocked = 0
    for p, m, algorithm in product((2, 3, 4), (1, 5, 9), ALGORITHMS):
        plan = lower(named(name, p, vocabulary=algorithm).make(m), (collect, communicate))
        assert ends(plan, num_queues=1) is accepted(plan, 1), f"{p=} {m=} {algorithm=}"
        blocked += not accepted(plan, 1)
    assert blocked


class Copying(StreamLane):
    """Copies what a transfer has brought in the stream of the lane, and not where the passes wait."""

    def start(self, work: Callable[[], Any], uses: Iterable[torch.Tensor]) -> StreamResult:
        def copied() -> None:
            work()
            self.gpus.compute(self.rank, lambda: None)

        return super().start(copied, uses)


def test_what_follows_a_transfer_in_its_lane_blocks_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, plan), *_ = plans("zb-h1", (2,), lambda p: (p,))
    assert ends(plan, num_queues=1)
    monkeypatch.setitem(globals(), "StreamLane", Copying)
    assert not ends(plan, num_queues=1)


def accepted(plan: Plan, num_queues: int) -> bool:
    try:
        prove_for_queues(plan, num_queues)
    except PlanError:
        return False
    return True


def test_hosts_that_join_a_group_among_the_passes_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of the simulation: ranks start the kinds of collectives in different orders."""
    monkeypatch.setattr(nccl, "JOIN_TIMEOUT_S", 0.5)
    (_, plan), *_ = plans("zb-h1", (2,), lambda p: (p,))
    with mock.patch.object(groups, "_joined", lambda ranks, options: groups._made([ranks], options)[0]):
        assert not ends(plan)
    assert ends(plan)

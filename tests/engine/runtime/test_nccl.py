"""The transport, the handlers and the executor by NCCL's rules, on simulated GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from typing import Any

import pytest
import torch

from megatron.zero_bubble import SCHEDULES, Pass, Placement, Schedule, build
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.core.plan import Additions, Queues, lower, plan_of, plan_of_evaluation, prove
from megatron.zero_bubble.engine.runtime.executor import Executor
from megatron.zero_bubble.engine.runtime.handlers import handlers
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers.nccl import GPUs
from tests.helpers.rows import some

EMPTY = -1
NAMES = some(
    SCHEDULES, "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v", "seq-1f1b", "pipe-offload", "zero-pp"
)
"""All schedules; by default, those whose messages differ most."""


COUNTS = {2: (1, 3, 6), 3: (4, 8), 4: (1, 3, 4, 5, 11, 12)}
"""Numbers of microbatches by the number of ranks: fewer than the ranks, as many and more, even and odd."""


def plans(name: str, ranks: Sequence[int]) -> Iterator[Plan]:
    """Yield the plans of a schedule for training, evaluation and post-validation."""
    return chain.from_iterable(_plans(name, p) for p in ranks)


@cache
def _plans(name: str, p: int) -> tuple[Plan, ...]:
    made: list[Plan] = []
    for m in COUNTS[p]:
        schedule = build(name, num_ranks=p, num_microbatches=m)
        for post_receives in ("early", "late"):
            made.append(plan_of(schedule, Additions(post_receives)))
            made.append(plan_of_evaluation(schedule, Additions(post_receives)))
            made.append(plan_of(schedule, Additions(post_receives, post_validation=True)))
    return tuple(made)


@pytest.fixture(scope="module", autouse=True)
def free_plans() -> Iterator[None]:
    """Later tests of the process do not keep them, which would make every search for garbage longer."""
    yield
    _plans.cache_clear()


@dataclass
class Iteration:
    """An iteration of all ranks; a value is a tensor with its number, once its pass has run on the GPU."""

    plan: Plan
    gpus: GPUs
    transports: list[Transport]

    def __post_init__(self) -> None:
        flow = self.plan.schedule.flow
        values = [value for work in self.plan.schedule.passes() for value in flow.outputs(work)]
        self.numbers = {value: number for number, value in enumerate(values)}
        self.wrong: list[str] = []
        self.computed = 0

    def issue(self, is_valid: bool = True) -> None:
        """Run the executors of all ranks, whose hosts never wait for each other."""
        for transport in self.transports:
            stages = dict.fromkeys(range(self.plan.schedule.num_stages), _Stage(self, transport.rank))
            by_op = handlers(stages, transport, lambda _message: torch.tensor(EMPTY), validate=lambda: is_valid)
            assert Executor(self.plan, transport.rank, by_op).run() is is_valid
            assert transport.num_in_flight == 0


@dataclass
class _Stage:
    """Passes that check on the GPU whether their inputs have arrived."""

    iteration: Iteration
    rank: int

    def new(self, _work: Pass) -> torch.Tensor:
        return torch.tensor(EMPTY)

    def run(self, work: Pass, inputs: Sequence[Any]) -> list[torch.Tensor]:
        iteration, flow = self.iteration, self.iteration.plan.schedule.flow
        needs, makes = flow.inputs(work), flow.outputs(work)
        outputs = [self.new(work) for _ in makes]

        def kernel() -> None:
            iteration.computed += 1
            for value, tensor in zip(needs, inputs, strict=True):
                if (tensor != iteration.numbers[value]).any():
                    iteration.wrong.append(f"{work} got {tensor.tolist()} for {value}")
            for value, tensor in zip(makes, outputs, strict=True):
                tensor.fill_(iteration.numbers[value])

        iteration.gpus.compute(self.rank, kernel)
        return outputs


ONE_PER_DIRECTION: dict[str, Any] = {"eager": True, "backend": "gloo"}
"""An eager communicator per direction, as in jobs whose backend is not recognized as NCCL."""


def ends(plan: Plan, **rules: Any) -> bool:
    """Whether all that the ranks issue for ``plan`` ends on GPUs with these rules."""
    gpus = GPUs(plan.schedule.num_ranks, **rules)
    iteration = Iteration(plan, gpus, gpus.transports(plan.channels))
    assert gpus.run() or rules == ONE_PER_DIRECTION, "the channels must open"
    iteration.issue()
    return gpus.run()


def proved(plan: Plan, queues: Queues) -> bool:
    try:
        prove(plan, queues)
    except PlanError:
        return False
    return True


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", NAMES)
def test_every_message_arrives_at_its_pass(name: str, num_ranks: int) -> None:
    for plan in plans(name, (num_ranks,)):
        gpus = GPUs(plan.schedule.num_ranks)
        iteration = Iteration(plan, gpus, gpus.transports(plan.channels))
        opened = len(gpus.communicators)
        if plan.drain:
            iteration.issue(is_valid=False)
            assert gpus.run(), f"{plan.schedule} deadlocks when a step is rejected"
        iteration.computed = 0
        iteration.issue()
        assert gpus.run(), f"{plan.schedule} deadlocks"
        assert iteration.wrong == []
        assert iteration.computed == sum(1 for _ in plan.schedule.passes())
        both_ways = plan.channels | {(target, source) for source, target in plan.channels}
        assert len(gpus.communicators) == opened == len(both_ways), "a pass has opened a channel, which blocks"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("rules", "queues"), [(ONE_PER_DIRECTION, Queues.DIRECTION), ({"num_queues": 1}, Queues.DEVICE)]
)
def test_plans_deadlock_where_the_proof_says_so(name: str, rules: dict[str, Any], queues: Queues) -> None:
    disputed = [str(plan.schedule) for plan in plans(name, (2, 3)) if ends(plan, **rules) is not proved(plan, queues)]
    assert disputed == []


@pytest.mark.parametrize(("name", "kinds"), [("interleaved-1f1b", {"training", "evaluation"}), ("zb-h1", set())])
def test_one_communicator_per_direction_deadlocks(name: str, kinds: set[str]) -> None:
    """Eager communicators block plans of schedules that skip ranks in neither direction."""
    blocked = set()
    for p, m in product((2, 3), range(1, 7)):
        schedule = build(name, num_ranks=p, num_microbatches=m)
        for kind, plan in (("training", lower(schedule)), ("evaluation", plan_of_evaluation(schedule))):
            if not ends(plan, **ONE_PER_DIRECTION):
                blocked.add(kind)
    assert blocked == kinds


@pytest.mark.parametrize("name", NAMES)
def test_eager_communicators_block_no_plan(name: str) -> None:
    """torch 2.15 creates the communicator of a group with the group, where the host waits for the other members."""
    assert [str(plan.schedule) for plan in plans(name, (2, 3)) if not ends(plan, eager=True)] == []


def test_one_hardware_queue_deadlocks() -> None:
    """The plan of ``tests/core/plan/test_prove.py`` that needs several queues."""
    rows = [
        "0F0 3F0 0F1 0F2 3B0 0B0 3F1 3B1 0B1 3F2 3B2 0B2 0W0 0W1 0W2 3W0 3W1 3W2",
        "1F0 4F0 4B0 1B0 1W0 4W0 1F1 4F1 4B1 1B1 1F2 4F2 4B2 1B2 1W1 1W2 4W1 4W2",
        "2F0 5F0 5B0 2B0 2F1 5F1 5B1 2B1 2F2 5F2 5B2 2B2 2W0 2W1 2W2 5W0 5W1 5W2",
    ]
    plan = lower(Schedule.from_text("late", Placement.interleaved(3, 2), 3, map(str.split, rows)))
    assert ends(plan)
    assert not ends(plan, num_queues=1)

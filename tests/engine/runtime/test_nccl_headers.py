"""Headers between hosts, with the transport, the handlers and the executor by NCCL's rules, on simulated GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from megatron.zero_bubble import SCHEDULES, build
from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.core.ir.ops import Channel
from megatron.zero_bubble.core.plan import Additions, Queues, plan_of, plan_of_evaluation
from megatron.zero_bubble.core.schedules import sliced
from megatron.zero_bubble.engine.runtime.executor import Executor
from megatron.zero_bubble.engine.runtime.handlers import handlers
from megatron.zero_bubble.engine.runtime.headers import HeaderedChannels
from tests.engine.runtime.test_nccl import EMPTY, Iteration, _Stage, proved
from tests.helpers.nccl import GPUs

COUNTS = {2: (1, 4), 3: (4,), 4: (5, 8)}
WHOLE = [name for name in SCHEDULES if name not in sliced()]  # different lengths have no slices
HEADER_TIMEOUT_S = 20.0


@dataclass
class HostQueues:
    """The hosts of a pipeline in one process: a queue of numbers per channel and tag."""

    queues: dict[tuple[Channel, int], SimpleQueue[list[int]]] = field(default_factory=dict)

    def send(self, channel: Channel, numbers: Sequence[int], tag: int, _failure: Any) -> Numbers:
        self._queue(channel, tag).put(list(numbers))
        return Numbers(list)

    def receive(self, channel: Channel, _count: int, tag: int, _failure: Any) -> Numbers:
        queue = self._queue(channel, tag)
        return Numbers(lambda: queue.get(timeout=HEADER_TIMEOUT_S))

    def _queue(self, channel: Channel, tag: int) -> SimpleQueue[list[int]]:
        # Both hosts may be the first to ask; a defaultdict could give each a queue of its own.
        return self.queues.setdefault((channel, tag), SimpleQueue())


class Numbers:
    """Numbers of another host."""

    def __init__(self, get: Callable[[], list[int]]) -> None:
        self._get, self._got = get, None

    def wait(self) -> list[int]:
        self._got = self._get() if self._got is None else self._got
        return self._got


@dataclass
class HeaderedIteration(Iteration):
    """An iteration in which hosts wait for each other's headers; values have a length by microbatch."""

    def issue(self, is_valid: bool = True) -> None:
        """Run the executors of all ranks, in a thread each."""
        hosts = HostQueues()

        def run(rank: int) -> None:
            transport = self.transports[rank]
            one = torch.get_default_dtype()
            channels = HeaderedChannels(
                transport,  # type: ignore[arg-type]
                hosts,  # type: ignore[arg-type]
                lambda _stage: (one,),
                lambda _message, specs: torch.full(specs[0].shape, EMPTY),
            )
            stages = dict.fromkeys(range(self.plan.schedule.num_stages), _StageOfLengths(self, rank))
            by_op = handlers(stages, channels, lambda _message: None, validate=lambda: is_valid)
            assert Executor(self.plan, rank, by_op).run() is is_valid
            assert transport.num_in_flight == 0

        with ThreadPoolExecutor(len(self.transports)) as threads:
            list(threads.map(run, range(len(self.transports))))
        assert all(queue.empty() for queue in hosts.queues.values())


class _StageOfLengths(_Stage):
    """Passes whose values have as many elements as their microbatch is long."""

    def new(self, work: Any) -> torch.Tensor:
        return torch.full((1 + work.microbatch % 3,), EMPTY)


def plans(name: str, num_ranks: int) -> list[Plan]:
    """The plans of a schedule for training, evaluation and post-validation, with late receives."""
    made = []
    for count in COUNTS[num_ranks]:
        schedule = build(name, num_ranks=num_ranks, num_microbatches=count)
        made.append(plan_of(schedule, Additions("late")))
        made.append(plan_of_evaluation(schedule, Additions("late")))
        made.append(plan_of(schedule, Additions("late", post_validation=True)))
    return made


def ends(plan: Plan, is_valid: bool = True, **rules: Any) -> HeaderedIteration | None:
    """The iteration, if all that the ranks issue for it ends on GPUs with these rules."""
    gpus = GPUs(plan.schedule.num_ranks, **rules)
    iteration = HeaderedIteration(plan, gpus, gpus.transports(plan.channels))
    assert gpus.run(), "the channels must open"
    iteration.issue(is_valid)
    if not gpus.run():
        return None
    if not is_valid:  # run the passes again
        iteration.issue()
        if not gpus.run():
            return None
    return iteration


@pytest.mark.parametrize(
    "num_ranks", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", WHOLE)
def test_plans_with_headers_end_where_the_proof_says_so(name: str, num_ranks: int) -> None:
    """Also on one hardware queue, and those that stop because a step is rejected."""
    for plan in plans(name, num_ranks):
        for rules, queues in (({}, Queues.CHANNEL), ({"num_queues": 1}, Queues.DEVICE)):
            for is_valid in (True, False) if plan.drain else (True,):
                iteration = ends(plan, is_valid, **rules)
                assert (iteration is not None) is proved(plan, queues), (plan.schedule, rules, is_valid)
                assert iteration is None or iteration.wrong == []

"""Every answer of the planner to a run can run: it is lowered with the run's options, and proved for its queues."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from megatron.zero_bubble.core.analysis.memory import peaks_in_order
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.formats.costs import CostsFile, costs_to_json
from megatron.zero_bubble.core.ir import WHOLE, Slices
from megatron.zero_bubble.core.ir.queues import HardwareQueues
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.planning import worker
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.feasibility import ONE_QUEUE, Feasibility
from megatron.zero_bubble.planning.figures import measured
from megatron.zero_bubble.planning.question import of_run
from megatron.zero_bubble.planning.setup import Searched, Setup, Synchronous, Validated
from megatron.zero_bubble.planning.worker import Request
from tests.helpers.sources import begun, divided

prove_module = sys.modules["megatron.zero_bubble.core.plan.prove"]
GIB = 2.0**30
PLACEMENTS: list[tuple[Any, int | None]] = [("linear", None), ("vee", None), ("loop", 2), ("loop", 3), ("wave", 4)]


def queues(number: int) -> HardwareQueues:
    return HardwareQueues(number, "", f"CUDA_DEVICE_MAX_CONNECTIONS is {number}", "32")


def random_request(seed: int) -> Request:
    rng = random.Random(seed)
    (placement, chunks), ranks = PLACEMENTS[seed % len(PLACEMENTS)], rng.choice((2, 3, 4))
    count = rng.choice((ranks, ranks + 1, 2 * ranks, 2 * ranks + 1))
    stages = ranks * {"linear": 1, "vee": 2}.get(placement, chunks or 1)

    def some(least: float, most: float) -> tuple[float, ...]:
        return tuple(rng.uniform(least, most) for _ in range(stages))

    costs = PassCosts(some(0.5, 2.0), some(0.5, 2.5), some(0.3, 1.5), rng.choice((0.0, 0.2, 0.6)))
    memory = PassMemory(*(tuple(GIB * of for of in some(*between)) for between in ((0.5, 1.5), (0.2, 0.5))))
    algorithm = rng.choice((None, None, 1, 2)) if chunks is None else None
    if algorithm is not None:
        times = VocabularyCosts.uniform(ranks, rng.uniform(0.2, 1.0), rng.uniform(0.1, 0.6))
        costs, memory = replace(costs, vocabulary=times), replace(memory, logits=(GIB / 8,) * ranks)
    own = queues(rng.choice((1, 1, 2, 8, 32))), rng.choice(("early", "late")), rng.random() < 0.3
    runs = Feasibility(*own, moved=rng.choice((0.0, 0.0, 0.5, 1.0)) if algorithm is None else 0.0)
    order = Searched(placement, chunks, rng.choice(("1p", "2p")))
    step = rng.choice((Validated(), Synchronous()))
    setup = Setup(order, vocabulary=divided(algorithm), step=step)
    return Request(costs_to_json(costs, memory), ranks, count, setup, runs)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 10 else pytest.mark.full) for seed in range(150)]
)
def test_every_answer_to_a_run_can_run(seed: int) -> None:
    """A search with little effort."""
    request = random_request(seed)
    assert Request.from_json(request.to_json()) == request
    costs = measured(CostsFile.parse(request.costs), request.num_ranks, request.num_microbatches)
    asked = replace(of_run(costs, request.setup, request.runs), effort=0.01)
    assert request.runs.refusal(answer(asked).schedule) is None


def test_an_order_that_needs_several_queues_is_planned_within_less_memory() -> None:
    """With late receives, what is shortest on a V needs two queues or more."""
    costs, memory = PassCosts((1.0,) * 8, (1.0,) * 8, (1.0,) * 8), PassMemory((GIB,) * 8, (GIB / 2,) * 8)
    plain = Request(costs_to_json(costs, memory), 4, 8, Setup(Searched("vee")))
    late = replace(plain, runs=Feasibility(queues(1), "late"))
    refused, proved = worker.plan(plain), worker.plan(late)
    assert "needs several hardware queues per GPU" in str(late.runs.refusal(refused.schedule))
    assert late.runs.refusal(proved.schedule) is None
    assert max(proved.peak_activation) < max(refused.peak_activation)
    assert proved.makespan_ms < 1.1 * refused.makespan_ms


@pytest.mark.parametrize(
    ("placement", "chunks", "slices"),
    [
        pytest.param(*placed, slices, marks=pytest.mark.full if placed[1] in (3, 4) and len(slices) > 1 else ())
        for placed in PLACEMENTS
        for slices in (WHOLE, Slices.even(2))
    ],
)
def test_first_schedules_run_with_one_queue(placement: Any, chunks: int | None, slices: Slices) -> None:
    """For every size of a batch that grows, early and late, Megatron's own included."""
    for ranks in (2, 3) if len(slices) > 1 else (2, 3, 4):
        for post_receives, fused, stock in (("early", False, False), ("late", False, True), ("late", True, False)):
            more = {"fused": fused, "keep_faster": stock, "receives": post_receives}
            source = begun(placement, ranks, slices, stages=chunks, **more)  # type: ignore[arg-type]
            for count in (1, ranks, ranks + 1, 2 * ranks, 3 * ranks):
                first = source.make(count)
                assert Feasibility(ONE_QUEUE, post_receives).refusal(first) is None, first.name  # type: ignore[arg-type]


def test_host_memory_is_part_of_what_can_run() -> None:
    schedule, memory = build("zb-h2", num_ranks=4, num_microbatches=8), PassMemory((GIB,) * 4, (GIB,) * 4)
    roomy = Feasibility(moved=1.0, host_memory=int(100 * GIB))
    assert roomy.refusal(schedule, memory=memory) is None
    reason = str(replace(roomy, host_memory=int(GIB)).refusal(schedule, memory=memory))
    assert reason.startswith("what moves must fit into 1 GiB of host memory per rank; got ")


def test_shorter_schedules_lose_to_those_that_run() -> None:
    """The schedule that the run begins with counts where the best of a search is refused."""
    found = 0
    for seed in range(5):
        request = random_request(5 * seed + 2)  # on a loop
        costs = measured(CostsFile.parse(request.costs), request.num_ranks, request.num_microbatches)
        runs = Feasibility(queues(1), "late")
        order = replace(request.setup.order, limit="1p")  # type: ignore[type-var]
        setup = replace(request.setup, order=order, vocabulary=None)
        asked = replace(of_run(costs, setup, runs), effort=0.01)
        (first,) = asked.instead
        least = simulate(first, *costs.on(first.placement)).makespan_ms
        best = answer(asked.deciding(step=Synchronous()))
        if runs.refusal(answer(replace(asked, runs=None)).schedule) is not None:
            found += 1
            assert best.timeline.makespan_ms <= least * (1 + 1e-9)
        assert max(peaks_in_order(best.schedule, costs.on(best.schedule.placement)[1])) <= asked.limit * (1 + 1e-9)  # type: ignore[operator]
    assert found


@pytest.mark.parametrize(("number", "count"), [(1, 2), (32, 2)])
def test_plans_that_run_with_the_queues_of_a_run_are_proved_once(number: int, count: int) -> None:
    """For training and for evaluations; few hardware queues are the stricter rule."""
    proofs = mock.Mock(side_effect=prove_module._prove_run)
    with mock.patch.object(prove_module, "_prove_run", proofs):
        Feasibility(queues(number)).check(build("zb-h1", num_ranks=4, num_microbatches=8))
    assert proofs.call_count == count

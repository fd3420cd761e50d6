"""Run emulated stages under the real executor, and compare their clocks with the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product

import torch.distributed as dist

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.ir import WHOLE, Op, Pair, Plan, Schedule, Slices
from megatron.zero_bubble.core.ir.vocabulary import FLOWS
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.schedules import SCHEDULES, build
from megatron.zero_bubble.core.search.vocabulary import with_vocabulary
from megatron.zero_bubble.engine.runtime.executor import Executor
from megatron.zero_bubble.engine.runtime.handler import Handler
from megatron.zero_bubble.engine.runtime.handlers import handlers
from megatron.zero_bubble.engine.runtime.observer import IterationObserver
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers.emulate.clock import VirtualClock
from tests.helpers.emulate.links import VirtualCollectives, VirtualLinks
from tests.helpers.emulate.optimizer import VirtualOptimizer
from tests.helpers.emulate.stages import EmulatedStage, VirtualStage

# Forward, backward, weight gradient and transfer in ms: equal passes, a GPT of the Zero Bubble paper, a slow link.
_COST_RATIOS = ((10.0, 10.0, 10.0, 0.0), (18.522, 18.086, 9.337, 0.601), (5.0, 9.0, 3.0, 4.0))
_CUTS = (Slices.even(4), Slices((0.4, 0.3, 0.2, 0.1)))
_ATTENTION = 0.3
_OF_VOCABULARY = (4.0, 3.0, 0.5, 0.7)
"""S, T, I and J in ms."""


def execute(
    plan: Plan,
    stage: EmulatedStage,
    transport: Transport | VirtualLinks,
    validate: Callable[[], bool] = lambda: True,
    observer: IterationObserver | None = None,
    more: Mapping[type[Op], Handler] | None = None,
) -> None:
    """Run this rank's part of ``plan``, with ``stage`` for all its stages.

    Args:
        more: handlers for ops other than passes and messages.
    """
    rank = transport.rank
    stages = dict.fromkeys(plan.schedule.placement.stages_of(rank), stage)
    own = handlers(stages, transport, stage.new_buffer, observer, validate)
    Executor(plan, rank, {**own, **(more or {})}, observer).run()


def virtual_iterations(
    schedule: Schedule, costs: PassCosts, step_ms: float, ahead: bool, count: int, transport: Transport
) -> list[float]:
    """Run ``count`` iterations, and return the end of each optimizer step of this rank, in ms of its virtual clock."""
    plan = plan_of(schedule, Additions(post_validation=True))
    transport.open(plan.channels)
    clock = VirtualClock()
    assert dist.group.WORLD is not None
    optimizer = VirtualOptimizer(clock, step_ms, ahead, dist.group.WORLD)
    stage, links, ends = VirtualStage(schedule, costs, clock), VirtualLinks(transport, costs), []
    for _ in range(count):
        execute(plan, stage, links, optimizer.validate)
        optimizer.step()
        ends.append(clock.now_ms)
    optimizer.settle()
    return ends


def virtual_cases(num_ranks: int) -> Iterator[tuple[Schedule, PassCosts]]:
    """Yield every registered schedule with 1, P and 3P microbatches, each with three ratios of costs.

    A schedule of slices comes with even and with uneven cuts.
    """
    for name, recipe in SCHEDULES.items():
        for num_microbatches, slices in product((1, num_ranks, 3 * num_ranks), _CUTS if recipe.sliced else (WHOLE,)):
            schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_slices=slices)
            for ratio in _COST_RATIOS:
                yield schedule, PassCosts.uniform(schedule.placement, *ratio, attention=_ATTENTION)


def virtual_vocabulary_cases(num_ranks: int) -> Iterator[tuple[Schedule, PassCosts]]:
    """Yield every registered schedule of whole sequences with 1, P and 3P microbatches and both algorithms of
    vocabulary parallelism.
    """
    names = (name for name, recipe in SCHEDULES.items() if not recipe.sliced)
    for name, num_microbatches, algorithm in product(names, (1, num_ranks, 3 * num_ranks), FLOWS):
        schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        costs = PassCosts.uniform(schedule.placement, *_COST_RATIOS[1])
        costs = replace(costs, vocabulary=VocabularyCosts.uniform(num_ranks, *_OF_VOCABULARY))
        yield with_vocabulary(schedule, costs, algorithm, lag=0.5, delay=True), costs


def virtual_deviation_ms(
    schedule: Schedule,
    costs: PassCosts,
    transport: Transport,
    collectives: VirtualCollectives,
    num_elements: int = 1024,
) -> tuple[float, str]:
    """Execute ``schedule`` on virtual clocks and compare each pass of this rank with the simulation.

    Args:
        transport, collectives: those of the ranks of ``schedule``.
        num_elements: number of float64 elements per message.

    Returns:
        The largest difference of a start or end in ms, and its pass; infinity if the order differs.
    """
    plan = plan_of(schedule)
    transport.open(plan.channels)
    collectives.open(plan)
    clock = VirtualClock()
    stage, links = VirtualStage(schedule, costs, clock, num_elements), VirtualLinks(transport, costs)
    with collectives.handlers(plan, costs, clock) as more:
        execute(plan, stage, links, more={Pair: stage.pair, **more})
    planned = simulate(plan, costs).spans[transport.rank]
    if [span.pass_ for span in clock.spans] != [span.pass_ for span in planned]:
        return math.inf, "order"
    return max(
        (max(abs(ran.start_ms - due.start_ms), abs(ran.end_ms - due.end_ms)), str(due.pass_))
        for ran, due in zip(clock.spans, planned, strict=True)
    )

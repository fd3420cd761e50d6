"""Run emulated stages under the real executor, and compare their clocks with the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import torch
import torch.distributed as dist

from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.emulate.clock import VirtualClock
from megatron.zero_bubble.emulate.links import ExchangedTimes, VirtualLinks
from megatron.zero_bubble.emulate.optimizer import VirtualOptimizer
from megatron.zero_bubble.emulate.stages import EmulatedStage, VirtualStage
from megatron.zero_bubble.ir import WHOLE, Op, Plan, Schedule, Slices
from megatron.zero_bubble.ir.collectives import Spread, Sum
from megatron.zero_bubble.ir.vocabulary import FLOWS
from megatron.zero_bubble.plan import lower_training
from megatron.zero_bubble.runtime.collectives import collective_kinds
from megatron.zero_bubble.runtime.executor import Executor, Handler
from megatron.zero_bubble.runtime.groups import new_group
from megatron.zero_bubble.runtime.handlers import handlers
from megatron.zero_bubble.runtime.observer import IterationObserver
from megatron.zero_bubble.runtime.transport import Transport
from megatron.zero_bubble.schedules import SCHEDULES, build
from megatron.zero_bubble.search.vocabulary import with_vocabulary

# Forward, backward, weight gradient and transfer in ms: equal passes, a GPT of the Zero Bubble paper, a slow link.
_COST_RATIOS = ((10.0, 10.0, 10.0, 0.0), (18.522, 18.086, 9.337, 0.601), (5.0, 9.0, 3.0, 4.0))
_CUTS = (Slices.even(4), Slices((0.4, 0.3, 0.2, 0.1)))
_ATTENTION = 0.3
_OF_VOCABULARY = (4.0, 3.0, 0.5, 0.7)
"""S, T, I and J in ms."""
_MOST_WITH_VOCABULARY = 4
"""Most ranks with vocabulary parallelism: its cases make process groups, which takes a second each with 8 ranks."""


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


@contextmanager
def virtual_collectives(
    plan: Plan, costs: PassCosts, clock: VirtualClock, group: dist.ProcessGroup
) -> Iterator[dict[type[Op], Handler]]:
    """Context with the handlers of collectives on the virtual clock: they exchange the times at which ranks start them.

    Args:
        group: the ranks of the pipeline, for which one group per kind of collective is made. A collective call of all
            ranks of the job.
    """
    ranks = dist.get_process_group_ranks(group)
    groups = {kind: new_group(ranks, "gloo") for kind in sorted(collective_kinds(plan))}
    exchanges: list[ExchangedTimes] = []

    def start(op: Spread | Sum, inputs: Sequence[torch.Tensor]) -> list[ExchangedTimes]:
        ready_ms = max((float(tensor[0]) for tensor in inputs), default=0.0)
        end = clock.occupy(op, ready_ms, costs.collective())
        exchanges.append(ExchangedTimes(end, op.rank, groups[op.lane], costs))
        return exchanges[-1:] * len(op.effects(plan.schedule.flow).gives)

    yield {Spread: start, Sum: start}
    for exchange in exchanges:
        exchange.wait("end")
    for made in groups.values():
        dist.destroy_process_group(made)


def virtual_iterations(
    schedule: Schedule, costs: PassCosts, step_ms: float, ahead: bool, count: int, transport: Transport
) -> list[float]:
    """Run ``count`` iterations, and return the end of each optimizer step of this rank, in ms of its virtual clock."""
    plan = lower_training(schedule, post_validation=True)
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

    A schedule of slices comes with even and with uneven cuts; the others come, with P microbatches on up to 4 ranks,
    also with both algorithms of vocabulary parallelism.
    """
    for name, recipe in SCHEDULES.items():
        for num_microbatches, slices in product((1, num_ranks, 3 * num_ranks), _CUTS if recipe.sliced else (WHOLE,)):
            schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_slices=slices)
            for ratio in _COST_RATIOS:
                yield schedule, PassCosts.uniform(schedule.placement, *ratio, attention=_ATTENTION)
            if not recipe.sliced and num_microbatches == num_ranks <= _MOST_WITH_VOCABULARY:
                costs = PassCosts.uniform(schedule.placement, *_COST_RATIOS[1])
                costs = replace(costs, vocabulary=VocabularyCosts.uniform(num_ranks, *_OF_VOCABULARY))
                for algorithm in FLOWS:
                    yield with_vocabulary(schedule, costs, algorithm, lag=0.5, delay=True), costs


def virtual_deviation_ms(
    schedule: Schedule, costs: PassCosts, transport: Transport, group: dist.ProcessGroup, num_elements: int = 1024
) -> tuple[float, str]:
    """Execute ``schedule`` on virtual clocks and compare each pass of this rank with the simulation.

    Args:
        group: the ranks of the pipeline. With vocabulary parallelism, this is a collective call of all ranks of the
            job.
        num_elements: number of float64 elements per message.

    Returns:
        The largest difference of a start or end in ms, and its pass; infinity if the order differs.
    """
    plan = lower_training(schedule)
    transport.open(plan.channels)
    clock = VirtualClock()
    stage, links = VirtualStage(schedule, costs, clock, num_elements), VirtualLinks(transport, costs)
    with virtual_collectives(plan, costs, clock, group) as collectives:
        execute(plan, stage, links, more=collectives)
    planned = simulate(plan, costs).spans[transport.rank]
    if [span.pass_ for span in clock.spans] != [span.pass_ for span in planned]:
        return math.inf, "order"
    return max(
        (max(abs(ran.start_ms - due.start_ms), abs(ran.end_ms - due.end_ms)), str(due.pass_))
        for ran, due in zip(clock.spans, planned, strict=True)
    )

"""The time of a plan on GPUs with one hardware queue, where the wait for a transfer holds back everything behind it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from megatron.zero_bubble import PassCosts
from megatron.zero_bubble.core.analysis.simulate import Run
from megatron.zero_bubble.core.analysis.steps import Step, steps
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.ir import Op, Plan
from megatron.zero_bubble.core.plan.prove import in_one_queue, stream_of


class _Hold(Op):
    """The rank waits until its next transfer can start."""

    __slots__ = ()


def timeline_in_one_queue(plan: Plan, costs: PassCosts) -> Timeline:
    """Simulate the plan; before each transfer, a rank waits for the one before it in the same stream."""
    plain = steps(plan)
    rows = [list(_held_back(*row)) for row in zip(plain, in_one_queue(plain), strict=True)]
    run = Run(rows, plan.schedule, costs)
    run.iteration({})
    return Timeline(plan.schedule, tuple(map(tuple, run.spans)))


def _held_back(plain: Iterable[Step], held: Iterable[Step]) -> Iterator[Step]:
    places: list[int] = []
    shift = 0
    for position, (step, in_queue) in enumerate(zip(plain, held, strict=True)):
        more: tuple[Hashable, ...] = in_queue.waits[len(step.waits) :]
        if stream_of(step.op) is not None and more:
            yield Step(_Hold(), (), more, ())
            shift += 1
        places.append(position + shift)
        yield step._replace(after=tuple(places[giver] for giver in step.after))

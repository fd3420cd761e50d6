"""``1p``, the unit of memory limits, is the peak of 1F1B."""

from __future__ import annotations

from random import Random

import pytest

from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.score import within
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.plans import peak_memory
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.source import ZB_AUTO


def uneven(seed: int) -> Figures:
    """Random times and memory of a pipeline of random size; often the last rank keeps most of a microbatch."""
    draw = Random(seed)
    num_ranks, num_microbatches = draw.randint(1, 6), draw.randint(1, 10)
    last = [1.0] * (num_ranks - 1) + [draw.choice((1.0, 4.0, 20.0))]
    activation = tuple(draw.uniform(1.0, 3.0) * more for more in last)
    wgrad = tuple(draw.uniform(0.0, 1.5) * size for size in activation)
    times = [tuple(draw.uniform(1.0, 3.0) for _ in last) for _ in range(3)]
    costs, memory = PassCosts(*times, comm_ms=0.1), PassMemory(activation, wgrad)
    return Figures(num_ranks, num_microbatches, lambda on: (costs.fit(on), memory.fit(on)), memory_given=True)


@pytest.mark.parametrize("seed", range(40))
def test_1p_is_the_peak_of_1f1b(seed: int) -> None:
    costs = uneven(seed)
    sizes = {"num_ranks": costs.num_ranks, "num_microbatches": costs.num_microbatches}
    times, memory = costs.on(Placement.linear(costs.num_ranks))
    timeline = timeline_of(build("1f1b", **sizes), times, memory)
    assert costs.limit("1p") == pytest.approx(max(most_kept(timeline, memory)))
    assert costs.limit("0.5p") == pytest.approx(max(most_kept(timeline, memory)) / 2)


@pytest.mark.parametrize("seed", range(8))
def test_a_search_in_1p_is_never_longer_than_1f1b(seed: int) -> None:
    costs = uneven(seed)
    plain = answer(Question(costs, "1f1b", None, "makespan", fits=False)).timeline
    found = answer(
        Question(costs, ZB_AUTO, costs.limit("1p"), "makespan", placement=(Placement.linear(costs.num_ranks),))
    )
    assert within(found.timeline.makespan_ms, plain.makespan_ms)
    assert within(peak_memory(found.timeline, costs), peak_memory(plain, costs))

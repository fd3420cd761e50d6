"""Figures of a pipeline: made once per placement, with what is given in place of theirs, and the unit ``1p``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import permutations
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
from megatron.zero_bubble.planning.setup import Named, Searched, Setup
from megatron.zero_bubble.planning.shards import with_collectives
from tests.helpers.equal_weights import EqualStages


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
    plain = answer(Question(costs, Setup(Named("1f1b")))).timeline
    found = answer(Question(costs, Setup(Searched("linear")), costs.limit("1p")))
    assert within(found.timeline.makespan_ms, plain.makespan_ms)
    assert within(peak_memory(found.timeline, costs), peak_memory(plain, costs))


def test_only_one_field_is_a_function_and_it_is_called_once_per_placement() -> None:
    assert [field.name for field in fields(Figures) if "Callable" in str(field.type)] == ["make"]
    asked: list[Placement] = []

    def make(on: Placement) -> tuple[PassCosts, PassMemory]:
        asked.append(on)
        return PassCosts.uniform(on, 2.0, 2.0, 2.0), PassMemory.uniform(on)

    costs, placements = Figures(2, 4, make), (Placement.linear(2), Placement.vee(2))
    for on in (*placements, *placements):
        assert costs.on(on) is costs.on(on)
    assert asked == list(placements)


def test_given_figures_replace_those_of_the_costs_in_any_order() -> None:
    """Copies, messages, links and collectives are independent of each other; the last of a kind counts."""
    weights = EqualStages(lambda placement: 64.0 / placement.num_stages)
    changes: list[Callable[[Figures], Figures]] = [
        lambda costs: costs.with_copies(host_ms=3.0),
        lambda costs: costs.with_messages(0.5),
        lambda costs: costs.with_links({(0, 1): 2.0}),
        lambda costs: with_collectives(costs, 2, None, 5.0, 16.0),
    ]
    on, found = Placement.vee(2), []
    for order in permutations(changes):
        costs = replace(uneven_of_two(), weights=weights)
        for change in order:
            costs = change(costs)
        found.append((costs.on(on), costs.weights_on(on), costs.base))
    assert all(each == found[0] for each in found)
    times = found[0][0][0]
    assert times.host_ms == (1.5,) * 4 and times.message_ms == 0.5
    assert (times.comm(0, 1), times.comm(1, 0)) == (2.0, 0.1)
    assert times.gather_ms == (2 * 16.0 / (16.0 * 2),) * 4 and times.reduce_ms == (2.5,) * 4
    assert found[0][1] is None, "with sharded units, a rank holds what their plan says"
    again = uneven_of_two().with_copies(host_ms=3.0).with_copies(host_ms=1.0)
    assert again.on(on)[0].host_ms == (0.5,) * 4


def uneven_of_two() -> Figures:
    def make(on: Placement) -> tuple[PassCosts, PassMemory]:
        return PassCosts.uniform(on, 4.0, 4.0, 4.0, 0.1), PassMemory.uniform(on)

    return Figures(2, 4, make)

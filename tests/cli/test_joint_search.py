"""Tests of the search behind ``advise``: that it finds what asking every question finds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megatron.zero_bubble import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.core.schedules import SCHEDULES, build
from megatron.zero_bubble.planning.advice import Adviser, _in_order
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.change import Today, need_of
from megatron.zero_bubble.planning.division import Division
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.job.changes import JobChanges
from megatron.zero_bubble.planning.question import Offloading, Question
from megatron.zero_bubble.planning.setup import Cuts, Named, Offload, Searched, Setup


def random_pipeline(seed: int) -> tuple[JobChanges, Today]:
    """A small job with uneven layers, a large output layer, and little or much memory."""
    draw = random.Random(seed)
    ranks, count = draw.choice((2, 3, 4)), draw.choice((2, 4, 6, 8))
    layer = LayerFigures(
        draw.uniform(0.5, 2), draw.uniform(0.5, 2), draw.uniform(0.2, 2), 2.0**20, draw.uniform(0.2, 1) * 2**20
    )
    loss = LayerFigures(*(draw.uniform(0, 3) for _ in range(3)), 2.0**20, 2.0**19)
    layers = LayerCosts((layer,) * (2 * ranks), LayerFigures(), loss, comm_ms=draw.choice((0.0, 0.1)))
    division = Division(2 * ranks)

    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        return layers.on(division.on(placement))

    costs = Figures(ranks, count, on, True, layers=layers, division=division, most_layers=2, sequence=4096)
    schedule = build("1f1b", num_ranks=ranks, num_microbatches=count)
    timeline = timeline_of(schedule, *on(schedule.placement))
    limit = draw.choice((1.0, 2.0)) * costs.limit("1p")
    return JobChanges(schedule.placement, costs, limit, 1e6), Today(timeline, costs, need_of(timeline, costs))


def seeds(number: int, default: int) -> list[Any]:
    """Seeds, and whether searches are short, as for the one that runs by default."""
    return [*(pytest.param(seed, False, marks=pytest.mark.full) for seed in range(number)), pytest.param(default, True)]


@pytest.mark.parametrize(("seed", "is_short"), seeds(50, default=1))
def test_pruned_search_finds_what_all_questions_find(seed: int, is_short: bool, request: pytest.FixtureRequest) -> None:
    """No plan of any change is shorter than the fastest row, or takes less memory than that with the least."""
    pipeline, today = random_pipeline(seed)
    pipeline = replace(pipeline, effort=0.03)  # as the run decides
    if is_short:
        request.getfixturevalue("short_searches")
    adviser = Adviser(today, "makespan", pipeline.limit, lambda *_: None, 0.01)
    rows = adviser.advise(pipeline.changes()).rows
    best, least = today.timeline.makespan_ms, today.need.most
    for change in pipeline.changes():
        try:
            plan = answer(change.question)
        except UserError:
            continue
        need = need_of(plan.timeline, plan.costs)
        if need.most <= pipeline.limit * (1 + 1e-9):
            best = min(best, plan.timeline.makespan_ms)
            least = least if change.searches else min(least, need.most)
    found = {title: row for row in rows for title in row.titles}
    fastest = min([today.timeline.makespan_ms, *(row.ms for row in rows)])
    assert best * (1 - 2e-6) <= fastest <= 1.005 * best  # of plans that are as long, the one with less memory
    assert ("least memory" not in found) or found["least memory"].need.most <= least * (1 + 2e-6)


def single_features(pipeline: JobChanges) -> Iterator[Question]:
    """What ``plan`` is asked, one feature at a time."""
    costs, limit = pipeline.costs, pipeline.limit
    whole = Question(costs, Setup(Searched()), limit, effort=pipeline.effort)
    yield whole
    yield replace(whole.deciding(layout="auto"), costs=costs.evenly())
    yield whole.deciding(vocabulary=Divided("auto"))
    copies = costs.with_copies(bytes_per_ms=pipeline.host_bandwidth)
    yield replace(whole.deciding(offload=Offload("auto")), costs=copies, offloading=Offloading((limit,), limit))
    for name, recipe in SCHEDULES.items():
        if recipe.sliced and recipe.shape == "linear":
            yield whole.deciding(order=Named(name), cuts=Cuts("auto"))
        elif not (recipe.sliced or recipe.has_units or recipe.only_compared):
            yield whole.deciding(order=Named(name))


@pytest.mark.parametrize(("seed", "is_short"), seeds(200, default=20))
def test_joint_search_is_never_worse_than_one_feature(
    seed: int, is_short: bool, request: pytest.FixtureRequest
) -> None:
    """No feature alone, as ``zero-bubble plan`` would plan it, is faster within the memory than the fastest row."""
    pipeline, today = random_pipeline(1000 + seed)
    pipeline = replace(pipeline, effort=0.03)  # as the run decides
    if is_short:
        request.getfixturevalue("short_searches")
    rows = Adviser(today, "makespan", pipeline.limit, lambda *_: None, 0.01).advise(pipeline.changes()).rows
    fastest = min([today.timeline.makespan_ms, *(row.ms for row in rows)])
    for question in single_features(pipeline):
        try:
            plan = answer(question)
        except UserError:
            continue
        if need_of(plan.timeline, plan.costs).most <= pipeline.limit * (1 + 1e-9):
            assert fastest <= 1.005 * plan.timeline.makespan_ms, question.schedule


@pytest.mark.parametrize("seed", range(8))
def test_an_order_alone_is_searched_before_what_adds_to_it(seed: int) -> None:
    """On the same stages, though a layout has the lower bound."""
    pipeline, today = random_pipeline(seed)
    adviser = Adviser(today, "makespan", pipeline.limit, lambda *_: None, 0.01)
    ordered = _in_order([(adviser._least(each), each) for each in pipeline.changes() if each.searches])
    names = [change.name for _, change in ordered]
    added = [name for name in names if name.startswith("zb-auto") and ", " in name]
    assert any(name.endswith(", layout") for name in added)
    assert all(names.index(name.partition(", ")[0]) < names.index(name) for name in added)


@pytest.mark.parametrize("loss", [0.0, 4.0])
def test_a_layout_is_a_flag_only_where_it_differs_from_the_even_split(loss: float) -> None:
    layer, last = LayerFigures(1.0, 1.0, 1.0, 2.0**20, 2.0**19), LayerFigures(loss, loss, loss, 2.0**20, 2.0**19)
    layers, division = LayerCosts((layer,) * 8, LayerFigures(), last if loss else LayerFigures()), Division(8)
    costs = Figures(2, 4, lambda on: layers.on(division.on(on)), True, layers=layers, division=division, most_layers=4)
    pipeline = JobChanges(Placement.linear(2), costs, 2 * costs.limit("1p"), 1e6)
    (change,) = (each for each in pipeline.changes() if each.name == "zb-auto linear, layout")
    laid_out = change.of_plan(change.setup, answer(change.question))
    assert (laid_out.layout is not None) is bool(loss)

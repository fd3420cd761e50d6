"""Layouts by cost are never worse than the baselines, or than trying all layouts."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest

from megatron.zero_bubble import Placement, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.score import Goal
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.schedules import recipe
from megatron.zero_bubble.core.search.cut import even, least_layers
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.layout_plan import EVEN, MOVED, LayoutPlan
from megatron.zero_bubble.planning.layouts import lay_out, shifted_layers
from megatron.zero_bubble.planning.offer import Ask, Offer
from megatron.zero_bubble.planning.plans import auto, fitted
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.setup import BY_COST, Named, Searched, Setup, Synchronous, Validated
from tests.helpers.layouts import all_layouts, random_layers

NAMES = ("1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "interleaved-1f1b", "dualpipe-v")
LAYER, LOSS = LayerFigures(1.0, 1.1, 0.9, 4.0, 2.0), LayerFigures(2.0, 2.0, 2.0, 1.0, 1.0)


def of(layers: LayerCosts, num_ranks: int, num_microbatches: int) -> Figures:
    def unused(_: Placement) -> None:
        raise AssertionError("costs of even stages come from the layers")

    return Figures(num_ranks, num_microbatches, unused, layers=layers).evenly()  # type: ignore[arg-type]


def asking(costs: Figures, objective: Metric, limit: float | None) -> Question:
    """About a schedule that is known."""
    return Question(costs, Setup(step=Validated() if objective == "span" else Synchronous()), limit)


def making(schedule: Schedule) -> Ask:
    """Offers one schedule for every layout."""
    return lambda question: [Offer(schedule, question.costs)]


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 200), marks=pytest.mark.full)], ids=["few", "the others of 200"]
)
def test_no_layout_and_no_baseline_is_better(seeds: range) -> None:
    """Up to 12 layers on up to 4 ranks, with random costs, schedules, objectives and memory limits."""
    for seed in seeds:
        dice = Random(seed)
        p, m, name = dice.randint(1, 4), dice.randint(1, 10), dice.choice(NAMES)
        objective: Metric = dice.choice(("span", "makespan"))
        own = recipe(name)
        schedule = build(name, num_ranks=p, num_microbatches=m)
        placement = own.placement(p, own.num_chunks(None))
        layers = random_layers(dice, dice.randint(max(1, sum(least_layers(placement))), 12))
        costs = of(layers, p, m)
        limit = dice.choice((None, dice.uniform(0.4, 1.2) * p * costs.microbatch))
        plan = lay_out(asking(costs, objective, limit), [placement], making(schedule)).part(LayoutPlan)
        assert plan is not None

        def valued(
            layout: tuple[int, ...], layers: LayerCosts, schedule: Schedule, limit: float | None, objective: str
        ) -> tuple[float, float]:
            figures, memory = layers.on(layout)
            timeline = simulate(schedule, figures, memory)
            peak = max(most_kept(timeline, memory))
            return peak if limit is not None and peak > limit * (1 + 1e-9) else 0.0, getattr(
                timeline, f"{objective}_ms"
            )

        options = list(all_layouts(placement, layers.num_layers))
        best = min(valued(layout, layers, schedule, limit, objective) for layout in options)
        if best[0]:  # no layout is within the limit
            best, limit = min(valued(layout, layers, schedule, None, objective) for layout in options), None
        assert plan.best.value == pytest.approx(best, rel=1e-9), (seed, name, plan.best.text)
        evenly = even(placement, layers.num_layers)
        for name_, layout in ((EVEN, evenly), (MOVED, shifted_layers(layers, placement, evenly))):
            assert plan.others[name_].value == pytest.approx(valued(layout, layers, schedule, limit, objective))


@pytest.mark.usefixtures("short_searches")
@pytest.mark.parametrize(("name", "limit"), [("zb-v", 1.0), ("zb-auto", 0.6)])
def test_searched_schedules_are_never_longer_than_those_of_the_baselines(name: str, limit: float) -> None:
    """The schedule is made for the layout, and so are those that it is compared with, unless a bound rules them out."""
    layers = LayerCosts((LAYER,) * 12, LayerFigures(0.1, 0.0, 0.1), LOSS, 0.1)
    costs = of(layers, 3, 8)
    memory = limit * 3 * costs.microbatch

    def make(own: Figures, placement: Placement) -> Schedule:
        if name == "zb-auto":
            return auto(own, "linear" if placement.num_stages == 3 else "vee", Goal("span", memory))
        return fitted(build(name, num_ranks=3, num_microbatches=8), own, "span")

    placements = [Placement.vee(3), *([Placement.linear(3)] if name == "zb-auto" else [])]
    order = Searched("auto") if name == "zb-auto" else Named(name)
    made = answer(replace(asking(costs, "span", memory), setup=Setup(order, layout=BY_COST, step=Validated())))
    plan = made.part(LayoutPlan)
    assert plan is not None and any(other.is_bound for other in plan.others.values())
    assert all(other.excess or other.ms >= plan.best.ms * (1 - 1e-9) for other in plan.others.values())
    for placement in placements:
        evenly = even(placement, 12)
        for layout in (evenly, shifted_layers(layers, placement, evenly)):
            own = costs.laid_out(placement, layout)
            timeline = simulate(make(own, placement), *own.on(placement))
            if max(most_kept(timeline, own.on(placement)[1])) <= memory * (1 + 1e-9):
                assert plan.best.ms <= timeline.span_ms * (1 + 1e-9)
    assert made.schedule.placement in placements and not plan.best.excess and EVEN in plan.gains()


def test_layers_are_moved_until_the_loss_is_no_longer_the_longest() -> None:
    """As the authors do it: one layer to every stage before the last, the nearest first (4 layers per rank, and a loss
    of 3.9 and of 1.8 layers).
    """
    linear = Placement.linear(8)
    for layers_of_loss, expected in ((3.9, (4, 4, 4, 4, 5, 5, 5, 1)), (1.8, (4, 4, 4, 4, 4, 4, 5, 3))):
        loss = LayerFigures(*(layers_of_loss * ms for ms in (1.0, 1.1, 0.9)))
        assert shifted_layers(LayerCosts((LAYER,) * 32, LayerFigures(), loss), linear, (4,) * 8) == expected
    assert shifted_layers(LayerCosts((LAYER,) * 3, LayerFigures(), LOSS), Placement.linear(1), (3,)) == (3,)


def test_the_limit_has_one_unit_for_all_layouts() -> None:
    costs = of(LayerCosts((LAYER,) * 8, LayerFigures(), LOSS), 4, 8)
    assert costs.limit("1p") == costs.laid_out(Placement.linear(4), (3, 3, 2, 0)).limit("1p") == 4 * 8.0


def test_a_layout_needs_costs_per_layer() -> None:
    with pytest.raises(UserError, match="a layout by cost needs costs per layer"):
        Figures(2, 2, lambda _: LayerCosts((LAYER,) * 2).on((1, 1))).evenly()


def test_without_any_schedule_the_reason_is_given() -> None:
    costs = of(LayerCosts((LAYER,) * 8, LayerFigures(), LOSS), 4, 8)

    setup = Setup(Searched("linear"), layout=BY_COST)
    with pytest.raises(UserError, match="the memory limit admits no schedule"):
        answer(Question(costs, setup, 1.0))


@pytest.mark.full
@pytest.mark.parametrize("loss", [0.3, 3.0, 12.0])
def test_searching_for_128_layers_on_32_ranks_takes_seconds(loss: float) -> None:
    """Two seconds of processor time on one core of a server; the bound here is for slower ones."""
    layers = LayerCosts((LAYER,) * 128, LayerFigures(0.1, 0.0, 0.1), LayerFigures(loss, loss, loss, 1.0), 0.1)
    costs = of(layers, 32, 128)
    setup = Setup(Searched("auto"), layout=BY_COST, step=Validated())
    began = time.process_time()
    plan = answer(Question(costs, setup, 32 * costs.microbatch)).part(LayoutPlan)
    assert time.process_time() - began < 6
    assert plan is not None and all(other.ms >= plan.best.ms * (1 - 1e-9) for other in plan.others.values())


@pytest.mark.full
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_128_layers_on_32_ranks_take_seconds(name: str) -> None:
    """Two seconds of processor time on two cores of a server; the bound here is for slower ones."""
    kinds = LayerFigures(1.0, 1.1, 0.9, 4.0, 2.0), LayerFigures(2.0, 2.3, 1.7, 5.0, 2.0)
    layers = LayerCosts(
        (kinds[0],) * 3 + (kinds[1],) * 125, LayerFigures(0.1, 0.0, 0.1), LayerFigures(3.0, 3.0, 3.0, 1.0), 0.1
    )
    schedule = build(name, num_ranks=32, num_microbatches=128)
    began = time.process_time()
    question = asking(of(layers, 32, 128), "span", None)
    plan = lay_out(question, [schedule.placement], making(schedule)).part(LayoutPlan)
    assert time.process_time() - began < 8
    assert plan is not None and min(plan.gains().values()) > 0.02

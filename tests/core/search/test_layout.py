"""The layout search, compared with the simulator and with trying all layouts."""

from __future__ import annotations

from random import Random

import pytest

from megatron.zero_bubble import SCHEDULES, build, simulate
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.score import Goal
from megatron.zero_bubble.core.search import layout as module
from megatron.zero_bubble.core.search.cut import cut, even, least_layers
from megatron.zero_bubble.core.search.layout import LayoutTrials, best_layout, layouts, number_of_layouts
from megatron.zero_bubble.planning.layouts import shifted_layers
from tests.helpers.layouts import all_layouts, random_layers


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_layouts_are_valued_as_simulated(name: str, objective: str) -> None:
    """Fused, split and mixed backwards, and slices; the limit is exceeded or not."""
    schedule = build(name, num_ranks=3, num_microbatches=7)
    layers = random_layers(Random(7), 11)
    for layout in (even(schedule.placement, 11), cut(schedule.placement, layers.work_ms, 0.0, layers.loss.work_ms)):
        costs, memory = layers.on(layout)
        timeline = simulate(schedule, costs, memory)
        peak = max(most_kept(timeline, memory))
        for limit, excess in ((peak * 1.001, 0.0), (peak * 0.999, peak), (None, 0.0)):
            trial = LayoutTrials(layers, schedule, Goal(objective, limit))
            value = trial.value(layout)
            assert value.ms == pytest.approx(getattr(timeline, f"{objective}_ms"), rel=1e-12)
            assert value.excess == pytest.approx(excess, rel=1e-12)
            work = layers.rank_work_ms(schedule.placement, layout)
            assert value.unevenness == pytest.approx(sum(ms * ms for ms in work))
            assert trial.least_ms(layout) == pytest.approx(7 * max(work))


@pytest.mark.parametrize("seed", range(12))
def test_no_layout_is_better(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layouts are tried where they are few. Single moves, which are for many, end near the best one or at it."""
    dice = Random(seed)
    name = dice.choice(["1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b", "v-half"])
    schedule = build(name, num_ranks=dice.choice([3, 4]), num_microbatches=dice.choice([4, 8]))
    layers = random_layers(dice, dice.randint(8, 11))
    n, placement = layers.num_layers, schedule.placement
    trial = LayoutTrials(layers, schedule, Goal("span"))
    start = cut(placement, layers.work_ms, layers.embedding.work_ms, layers.loss.work_ms)
    best = min(trial.value(layout).ms for layout in all_layouts(placement, n))
    assert trial.value(best_layout(trial, n, [start])).ms == pytest.approx(best, rel=1e-9), "all are tried"
    monkeypatch.setattr(module, "_MOST_COMPARED", 0)
    found = trial.value(best_layout(trial, n, [start, even(placement, n)])).ms
    assert found <= best * 1.05
    assert found <= trial.value(start).ms


@pytest.mark.full
def test_single_moves_mostly_find_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of docs/planning.md: 141 of 150 cases."""
    excesses = []
    for seed in range(150):
        dice = Random(seed)
        name = dice.choice(["1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b", "v-half"])
        schedule = build(name, num_ranks=dice.choice([3, 4]), num_microbatches=dice.choice([4, 8]))
        layers = random_layers(dice, dice.randint(8, 11))
        placement, n = schedule.placement, layers.num_layers
        trial = LayoutTrials(layers, schedule, Goal("span"))
        evenly = even(placement, n)
        starts = [cut(placement, layers.work_ms, layers.embedding.work_ms, layers.loss.work_ms), evenly]
        starts.append(shifted_layers(layers, placement, evenly))
        found = []
        for most in (10_000, 0):
            monkeypatch.setattr(module, "_MOST_COMPARED", most)
            found.append(trial.value(best_layout(trial, n, starts)).ms)
        excesses.append(found[1] / found[0] - 1)
    assert sum(excess < 1e-9 for excess in excesses) >= 141 and max(excesses) < 0.045


def test_the_budget_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = build("zb-v", num_ranks=4, num_microbatches=8)
    layers = random_layers(Random(1), 11)
    start = even(schedule.placement, 11)
    monkeypatch.setattr(module, "_MOST_COMPARED", 0)
    trial = LayoutTrials(layers, schedule, Goal("span"))
    trial.most = 1
    best_layout(trial, 11, [start])
    assert trial.value.cache_info().currsize == 2, "the start, and one more"


def test_the_limit_is_more_important_than_the_length() -> None:
    """With the shortest layout's peak forbidden, the best layout within the limit is found."""
    schedule = build("1f1b", num_ranks=3, num_microbatches=6)
    layers = random_layers(Random(2), 9)
    placement = schedule.placement
    free = LayoutTrials(layers, schedule, Goal("span"))
    start = even(placement, 9)
    shortest = best_layout(free, 9, [start])
    peak = max(most_kept(simulate(schedule, *layers.on(shortest)), layers.on(shortest)[1]))
    limited = LayoutTrials(layers, schedule, Goal("span", peak * 0.99))
    found = best_layout(limited, 9, [start])
    allowed = [layout for layout in all_layouts(placement, 9) if not limited.value(layout).excess]
    assert found != shortest and not limited.value(found).excess
    assert limited.value(found).ms == pytest.approx(min(limited.value(layout).ms for layout in allowed))


def test_all_layouts_are_enumerated() -> None:
    placement = build("zb-v", num_ranks=2, num_microbatches=1).placement
    least = least_layers(placement)
    assert sorted(layouts(7, least)) == sorted(all_layouts(placement, 7))
    assert number_of_layouts(7, least) == len(list(layouts(7, least)))
    assert number_of_layouts(1, least) == 0

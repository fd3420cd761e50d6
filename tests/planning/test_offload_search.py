"""A memory limit holds for the plan with its moves: which schedules are offloaded, and which plan is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, build
from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement
from megatron.zero_bubble.plan.timelines import timeline_of
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.offload import Offloaded, plan_offload
from megatron.zero_bubble.planning.offload_search import best_offloaded, search_limits
from megatron.zero_bubble.planning.vocabulary import Planned, of_variants, variants

RANKS, MICROBATCHES = 4, 12


def figures(host_ms: float = 1.0, wgrad: float = 0.3) -> Figures:
    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        costs = PassCosts.uniform(placement, 2.0, 2.0, 2.0)
        return costs, PassMemory.uniform(placement, 1.0, wgrad)

    return Figures(RANKS, MICROBATCHES, on).with_copies(host_ms)


def of(costs: Figures, *names: str) -> Iterator[Planned]:
    for name in names:
        schedule = build(name, num_ranks=RANKS, num_microbatches=MICROBATCHES)
        yield Planned(timeline_of(schedule, *costs.on(schedule.placement)), costs)


def moved(limit: float | None) -> list[str]:
    """The schedules that were offloaded, in order, and the one that was taken."""
    offloaded: list[str] = []

    def move(before: Timeline, costs: Figures) -> Offloaded:
        offloaded.append(before.schedule.name)
        return plan_offload(before, *costs.on(before.schedule.placement), limit=limit)

    names = ("1f1b", "zb-h1", "zb-h2", "zb-h2")
    found = best_offloaded(lambda name: of(figures(), name), move, names, limit, "span")
    return [*offloaded, found.planned.timeline.schedule.name]


def test_a_schedule_above_the_limit_is_taken_if_its_moves_bring_it_below() -> None:
    """ZB-H2 keeps 7 microbatches, and 3.2 after offloading."""
    assert moved(limit=4.0) == ["1f1b", "zb-h1", "zb-h2", "zb-h2"], "no schedule is offloaded twice"


def test_a_shorter_schedule_that_does_not_fit_is_not_taken() -> None:
    assert moved(limit=2.8)[-1] == "zb-h1"


def test_without_one_that_fits_the_smallest_peak_is_taken() -> None:
    assert moved(limit=0.5)[-1] == "1f1b"


def test_what_is_longer_already_is_not_offloaded() -> None:
    costs = figures()

    def move(before: Timeline, costs: Figures) -> Offloaded:
        assert before.schedule.name == "zb-h2"
        return plan_offload(before, *costs.on(before.schedule.placement), limit=7.0)

    best_offloaded(lambda name: of(costs, name), move, ("zb-h2", "1f1b", "zb-h1"), 7.0, "span")


def test_searches_that_admit_nothing_are_skipped_unless_all_do() -> None:
    costs = figures()

    def move(before: Timeline, costs: Figures) -> Offloaded:
        return plan_offload(before, *costs.on(before.schedule.placement))

    def make(limit: float) -> Iterator[Planned]:
        if limit < 2:
            raise UserError(f"nothing within {limit:g}")
        yield from of(costs, "1f1b")

    assert best_offloaded(make, move, (0.5, 2.0), 0.5, "span").planned.timeline.schedule.name == "1f1b"
    with pytest.raises(UserError, match=r"nothing within 0\.5"):
        best_offloaded(make, move, (0.5, 1.0), 0.5, "span")


def test_limits_of_searches() -> None:
    assert search_limits(figures(), 2.0) == (2.0, 3.0, 4.0, 8.0)
    assert search_limits(figures(), 4.0) == (4.0, 6.0, 8.0)
    assert search_limits(figures(), 2.0, vocabulary=True) == (2.0, 4.0)
    assert search_limits(figures(), 9.0) == (9.0, 13.5, 18.0)


def test_every_variant_is_offloaded_with_its_own_costs() -> None:
    """The passes of algorithm 2 are 1 ms longer here, and so the copies of its variant are."""
    given = figures()
    vocabulary = VocabularyCosts.uniform(RANKS, 0.5, 0.5)
    base = replace(given, on=lambda on: (replace(given.on(on)[0], vocabulary=vocabulary), given.on(on)[1]))
    slow = [
        replace(each, costs=base.with_copies(float(each.algorithm or 0))) for each in variants(base, "auto")
    ]  # fmt: skip
    seen: dict[float, str] = {}

    def move(before: Timeline, costs: Figures) -> Offloaded:
        on = costs.on(before.schedule.placement)
        seen[on[0].host_ms[0]] = before.schedule.name
        return plan_offload(before, *on, limit=3.0)

    def make(limit: float | None) -> Iterator[Planned]:
        zb_h1 = build("zb-h1", num_ranks=RANKS, num_microbatches=MICROBATCHES)
        return of_variants(slow, lambda _: [zb_h1], limit, "span")

    found = best_offloaded(make, move, (None, 3.0), 0.5, "span")
    assert found.planned.costs in [each.costs for each in slow]
    assert seen.keys() == {1.0, 2.0}
    assert "(vocabulary 1)" in seen[1.0] and "(vocabulary 2)" in seen[2.0]

"""A memory limit holds for the plan with its moves: which schedules are offloaded, and which plan is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, build
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import PlanFile
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.planning import choosers
from megatron.zero_bubble.planning.answer import Answer, answer
from megatron.zero_bubble.planning.choosers import offload, schedules, vocabulary
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.offer import Ask, Offer, score
from megatron.zero_bubble.planning.question import Offloading, Question, search_limits
from megatron.zero_bubble.planning.score import best
from megatron.zero_bubble.planning.setup import Given, Offload, Setup, Validated
from megatron.zero_bubble.planning.vocabulary import Variant

RANKS, MICROBATCHES = 4, 12
MOVING = Setup(Given("plan.json"), offload=Offload("auto"), step=Validated())


def figures(host_ms: float = 1.0, wgrad: float = 0.3) -> Figures:
    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        costs = PassCosts.uniform(placement, 2.0, 2.0, 2.0)
        return costs, PassMemory.uniform(placement, 1.0, wgrad)

    return Figures(RANKS, MICROBATCHES, on).with_copies(host_ms)


def of(costs: Figures, *names: str) -> Iterator[Offer]:
    for name in names:
        yield Offer(build(name, num_ranks=RANKS, num_microbatches=MICROBATCHES), costs)


def moved(limit: float | None, names: Sequence[str] = ("1f1b", "zb-h1", "zb-h2", "zb-h2")) -> list[str]:
    """The schedules that were offloaded, in order, and the one that was taken."""
    costs = figures()
    question = Question(costs, MOVING, limit, Offloading(tuple(map(float, range(len(names)))), limit))
    found = [*offload(question, lambda asked: of(costs, names[int(asked.limit or 0)]))]
    offers = [each for each in found if isinstance(each, Offer)]
    return [*(each.schedule.name for each in offers), best(offers, partial(score, question)).offer.schedule.name]


def test_a_schedule_above_the_limit_is_taken_if_its_moves_bring_it_below() -> None:
    """ZB-H2 keeps 7 microbatches, and 3.2 after offloading."""
    assert moved(limit=4.0) == ["1f1b", "zb-h1", "zb-h2", "zb-h2"], "no schedule is offloaded twice"


def test_a_shorter_schedule_that_does_not_fit_is_not_taken() -> None:
    assert moved(limit=2.8)[-1] == "zb-h1"


def test_without_one_that_fits_the_smallest_peak_is_taken() -> None:
    assert moved(limit=0.5)[-1] == "1f1b"


def test_what_is_longer_already_is_not_offloaded() -> None:
    assert moved(7.0, ("zb-h2", "1f1b", "zb-h1")) == ["zb-h2", "zb-h2"]


def test_searches_that_admit_nothing_are_reported_unless_all_do() -> None:
    costs = figures()

    def asked(*limits: float) -> Answer:
        def make(question: Question, _: Ask) -> Iterator[Offer]:
            assert question.limit is not None
            if question.limit < 2:
                raise UserError(f"nothing within {question.limit:g}")
            yield from of(costs, "1f1b")

        return answer(Question(costs, MOVING, 0.5, Offloading(limits, 0.5)), (offload, make))

    found = asked(0.5, 2.0)
    assert found.schedule.name == "1f1b"
    (dropped,) = found.dropped
    assert str(dropped) == "a schedule within 0.5 microbatches, before offloading, dropped out: nothing within 0.5"
    with pytest.raises(UserError, match=r"nothing within 0\.5"):
        asked(0.5, 1.0)


def test_limits_of_searches() -> None:
    assert search_limits(figures(), 2.0) == (2.0, 3.0, 4.0, 8.0)
    assert search_limits(figures(), 4.0) == (4.0, 6.0, 8.0)
    assert search_limits(figures(), 2.0, inserts=True) == (2.0, 4.0)
    assert search_limits(figures(), 9.0) == (9.0, 13.5, 18.0)


def test_every_variant_is_offloaded_with_its_own_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes of algorithm 2 are 1 ms longer here, and so the copies of its variant are."""
    given = figures()
    times = VocabularyCosts.uniform(RANKS, 0.5, 0.5)
    base = replace(given, make=lambda on: (replace(given.on(on)[0], vocabulary=times), given.on(on)[1]))
    slow = [Variant(Divided(1), base.with_copies(1.0)), Variant(Divided(2), base.with_copies(2.0))]
    monkeypatch.setattr(choosers, "variants", lambda *_: slow)
    zb_h1 = build("zb-h1", num_ranks=RANKS, num_microbatches=MICROBATCHES)
    setup = replace(MOVING, order=Given("zb-h1", PlanFile(zb_h1)), vocabulary=Divided("auto"))
    question = Question(base, setup, 0.5, Offloading((None, 3.0), 3.0))
    found = list(offload(question, lambda own: vocabulary(own, lambda one: schedules(one, lambda _: ()))))
    offers = [each for each in found if isinstance(each, Offer)]
    assert all(each.costs in [variant.costs for variant in slow] for each in offers)
    seen = {each.costs.on(zb_h1.placement)[0].host_ms[0]: each.timeline.schedule.name for each in offers}
    assert seen.keys() == {1.0, 2.0}
    assert "(vocabulary 1)" in seen[1.0] and "(vocabulary 2)" in seen[2.0]

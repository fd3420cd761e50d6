"""The choice among cuts of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement, Schedule, Slices, build
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs.cuts import balanced
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.choosers import slices
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.offer import Offer
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.setup import Cuts, Searched, Setup, Synchronous, Validated


def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
    return PassCosts.uniform(placement, 1.0, 1.0, 1.0, attention=0.5), PassMemory.uniform(placement)


COSTS = Figures(4, 8, on)


def chosen(
    make: Callable[[Slices], Schedule], candidates: Sequence[Slices], limit: float | None, objective: Metric
) -> Schedule:
    """The schedule that is taken where ``make`` makes one for each of the cuts."""

    def ask(question: Question) -> Iterator[Offer]:
        assert question.setup.cuts is not None
        (cut,) = question.setup.cuts.among
        yield Offer(make(cut), question.costs)

    step = Validated() if objective == "span" else Synchronous()
    setup = Setup(Searched(), cuts=Cuts(among=tuple(candidates)), step=step)
    *_, best = slices(Question(COSTS, setup, limit), ask)
    assert isinstance(best, Offer)
    return best.schedule


@pytest.mark.parametrize(("objective", "name"), [("span", "zb-h2"), ("makespan", "v-half")])
def test_shortest_by_the_objective(objective: Metric, name: str) -> None:
    """ZB-H2 has a span of 24 and a makespan of 27, V-Half 26.5 for both."""
    one, two = Slices.even(1), Slices.even(2)

    def make(slices: Slices) -> Schedule:
        return build("v-half" if slices == one else "zb-h2", num_ranks=4, num_microbatches=8)

    assert chosen(make, [one, two], None, objective).name == name
    assert chosen(make, [two, one], None, objective).name == name


def test_the_smallest_peak_if_none_is_within_the_limit() -> None:
    cuts = [balanced(on(Placement.linear(4))[0], 4), Slices.even(4)]

    def make(slices: Slices) -> Schedule:
        return build("seq-zb-h1", num_ranks=4, num_microbatches=8, num_slices=slices)

    assert chosen(make, cuts, None, "span").slices == cuts[0]
    assert chosen(make, cuts, 0.5, "span").slices == cuts[1]


def test_candidates_without_a_schedule_are_skipped() -> None:
    def make(slices: Slices) -> Schedule:
        if len(slices) < 4:
            raise UserError(f"{len(slices)} slices are too few")
        return build("seq-zb-h1", num_ranks=4, num_microbatches=8, num_slices=slices)

    few, enough = [Slices.even(2), Slices.even(3)], Slices.even(4)
    assert chosen(make, [*few, enough], None, "span").slices == enough
    with pytest.raises(UserError, match="3 slices are too few"):
        chosen(make, few, None, "span")

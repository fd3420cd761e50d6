"""Cuts with the smallest work of the busiest rank, compared with all cuts."""

from __future__ import annotations

from math import comb
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import Placement
from megatron.zero_bubble.core.analysis.score import is_less
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.search.cut import cut, even, least_layers, transfers
from tests.helpers.layouts import all_layouts

LOOP = Placement((0, 1, 2, 0, 1, 2))


def busiest(placement: Placement, layout: tuple[int, ...], work: list[float], embedding: float, loss: float) -> float:
    """Return the work of the busiest rank, layer by layer."""
    left = iter(work)
    stages = [sum(next(left) for _ in range(count)) for count in layout]
    stages[0] += embedding
    stages[-1] += loss
    return max(sum(stages[s] for s in placement.stages_of(rank)) for rank in range(placement.num_ranks))


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 10**6))
def test_no_cut_leaves_less_work_to_the_busiest_rank(seed: int) -> None:
    dice = Random(seed)
    num_ranks = dice.randint(1, 4)
    placement = dice.choice([Placement.linear(num_ranks), Placement.vee(num_ranks)])
    num_layers = dice.randint(max(1, sum(least_layers(placement))), 11)
    kinds = [dice.uniform(0.5, 3.0) for _ in range(dice.choice((1, 2, num_layers)))]
    work = dice.choices(kinds, k=num_layers)
    ends = dice.uniform(0.0, 1.0), dice.uniform(0.0, 8.0)
    found = cut(placement, work, *ends)
    least = min(busiest(placement, other, work, *ends) for other in all_layouts(placement, num_layers))
    assert sum(found) == num_layers and all(a >= b for a, b in zip(found, least_layers(placement), strict=True))
    assert busiest(placement, found, work, *ends) == pytest.approx(least, rel=1e-8)


@settings(deadline=None, max_examples=60)
@given(st.integers(5, 11), st.floats(0.0, 2.0), st.floats(0.0, 8.0))
def test_equal_layers_in_a_loop_are_cut_exactly(num_layers: int, embedding: float, loss: float) -> None:
    work, ends = [1.0] * num_layers, (embedding, loss)
    found = busiest(LOOP, cut(LOOP, work, *ends), work, *ends)
    least = min(busiest(LOOP, other, work, *ends) for other in all_layouts(LOOP, num_layers))
    assert found == pytest.approx(least, rel=1e-8)


def test_a_loop_of_different_layers_has_the_smallest_largest_stage() -> None:
    """The stages are cut, and then evened by single layers; here the mean of a rank is reached."""
    work = [3.0] * 3 + [1.0] * 9
    assert busiest(LOOP, cut(LOOP, work), work, 0.0, 0.0) == 6.0


def test_the_cut_of_other_ranks_is_even_too() -> None:
    """The loss alone makes the last rank the busiest; the others must not be left with what happens to fit."""
    assert cut(Placement.linear(4), [1.0, 1.0, 1.0, 1.0, 1.0, 1.5], 0.0, 9.0) == (2, 2, 2, 0)


def test_hundreds_of_different_layers_are_cut_within_the_bound_of_the_mean() -> None:
    dice = Random(3)
    work = [dice.uniform(1.0, 2.0) for _ in range(128)]
    for placement in (Placement.linear(16), Placement.vee(16), Placement.interleaved(16, 2)):
        found = busiest(placement, cut(placement, work, 0.1, 4.0), work, 0.1, 4.0)
        assert (sum(work) + 4.1) / 16 < found < 1.1 * (sum(work) + 4.1) / 16


def test_even_is_megatrons_split_or_counts_the_ends_as_layers() -> None:
    assert even(Placement.linear(4), 8) == (2, 2, 2, 2)
    assert even(Placement.linear(4), 10) == (2, 3, 3, 2)
    with pytest.raises(UserError, match="5 layers with .* do not fill 8 pipeline stages; use at least 6 layers"):
        even(Placement.vee(4), 5)


def test_transfers_move_single_layers_and_respect_the_least() -> None:
    assert list(transfers((0, 1, 1), (0, 1, 0))) == [(0, 2, 0), (1, 1, 0)]
    layouts = list(all_layouts(LOOP, 6))
    assert len(layouts) == len(set(layouts)) == comb(7, 5)


def test_rounding_does_not_decide() -> None:
    assert not is_less((1.0 - 1e-12, 1.0), (1.0, 1.0))
    assert is_less((1.0 + 1e-12, 0.9), (1.0, 1.0)) and not is_less((1.1, 0.9), (1.0, 1.0))

"""Layers that do not divide evenly over the stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import Placement
from megatron.zero_bubble.layers import balanced_layout


def by_rank(layout: str, placement: Placement) -> list[int]:
    """Layers, embedding and loss of every rank."""
    stages = layout.split("|")
    return [sum(len(stages[s]) for s in placement.stages_of(rank)) for rank in range(placement.num_ranks)]


def test_46_layers_on_16_ranks() -> None:
    linear, vee = Placement.linear(16), Placement.vee(16)
    assert balanced_layout(linear, 46) == "|".join(["Ett", *["ttt"] * 14, "ttL"])
    layout = balanced_layout(vee, 46)
    assert by_rank(layout, vee) == [3] * 16
    assert layout.count("t") == 46 and len(layout.split("|")) == 32


@given(st.integers(1, 8), st.sampled_from([Placement.linear, Placement.vee]), st.integers(0, 40))
def test_every_rank_has_about_the_same(p: int, make, layers: int) -> None:
    placement = make(p)
    try:
        layout = balanced_layout(placement, layers)
    except ValueError as error:
        least = int(str(error).split("at least ")[1].split()[0])
        assert layers < least
        assert balanced_layout(placement, least).count("t") == least
        return
    stages = layout.split("|")
    assert layout.count("t") == layers and len(stages) == placement.num_stages and all(stages)
    assert stages[0].startswith("E") and stages[-1].endswith("L")
    assert max(by_rank(layout, placement)) - min(by_rank(layout, placement)) <= 1


def test_too_few_layers() -> None:
    with pytest.raises(ValueError, match="5 layers do not fill 8 pipeline stages .* use at least 6 layers"):
        balanced_layout(Placement.vee(4), 5)

"""The table of cost terms has the fields of the values of costs, and converts them."""

from __future__ import annotations

from dataclasses import fields

import pytest

from megatron.zero_bubble.core.costs import PassCosts, PassMemory, SequenceTokens
from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures
from megatron.zero_bubble.core.costs.terms import BY_KEY, OF, OF_LAYER, SHARED, TERMS, Owner
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement

VEE, LINEAR = Placement.vee(2), Placement.linear(2)


def names(of: type) -> set[str]:
    return {field.name for field in fields(of)}


def test_every_field_of_costs_is_a_term() -> None:
    others_of: dict[type, tuple[Owner, set[str]]] = {
        PassCosts: ("passes", {"links", "vocabulary", "experts", "contention", "overlaps", "apart"}),
        PassMemory: ("memory", {"recomputed", "apart"}),
        VocabularyCosts: ("vocabulary", set()),
    }
    for value, (owner, others) in others_of.items():
        assert names(value) == {term.field for term in OF[owner]} | others
    assert {term.field for term in OF["tokens"]} == set(SequenceTokens._fields)
    assert names(LayerFigures) == {term.field for term in OF_LAYER}
    assert set(SHARED) <= names(LayerCosts)
    assert len(BY_KEY) == len(TERMS)


def test_needed_and_weighing_terms_exist() -> None:
    for term in TERMS:
        assert all(key in BY_KEY for key in (*term.needed, *filter(None, [term.weighed_by])))
        assert not term.of_layer or term.per == "stage", "a layer has a part of what its stage has"


@pytest.mark.parametrize(
    ("key", "figure", "on_vee", "on_linear"),
    [
        ("host_ms", 4.0, (2.0,) * 4, (4.0,) * 2),
        ("host_ms", (1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0), (3.0, 7.0)),
        ("attention", 0.25, (0.25,) * 4, (0.25,) * 2),
        ("attention", (0.2, 0.6, 0.0, 1.0), (0.2, 0.6, 0.0, 1.0), (0.5, 0.5)),
        ("output_ms", 4.0, (4.0, 4.0), (4.0, 4.0)),
        ("output_ms", (4.0, 5.0), (4.0, 5.0), (4.0, 5.0)),
        ("comm_ms", 4.0, 4.0, 4.0),
    ],
)
def test_figures_follow_their_row(key: str, figure: object, on_vee: object, on_linear: object) -> None:
    figures = {"forward_ms": (1.0, 3.0, 2.0, 2.0), key: BY_KEY[key].checked(figure)}
    assert BY_KEY[key].on(figures, VEE) == on_vee
    assert BY_KEY[key].on(figures, LINEAR) == pytest.approx(on_linear)


def test_a_value_outside_its_unit_is_named_with_its_place() -> None:
    with pytest.raises(UserError, match="attention of stage 1 is a share, so it must be between 0 and 1; got 2"):
        BY_KEY["attention"].checked([0.5, 2])
    with pytest.raises(UserError, match="output_ms of rank 0 must be a finite number, 0 or above; got -1"):
        BY_KEY["output_ms"].checked([-1])
    with pytest.raises(UserError, match="comm_ms must be a finite number"):
        BY_KEY["comm_ms"].checked([1.0])

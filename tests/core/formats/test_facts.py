"""Tests of the facts of a job, in the three kinds of files that have them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile, costs_to_json
from megatron.zero_bubble.core.formats.facts import FACTS, all_differences, differences, listed
from megatron.zero_bubble.core.formats.plan import plan_from_json, plan_to_json
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.schedules import build

OWN = {"num_layers": 24, "sequence_parallel": True, "gpu": "h100"}
COSTS = PassCosts.uniform(Placement.linear(2), 1.0, 1.0, 1.0)


def test_costs_and_plans_keep_them() -> None:
    assert CostsFile.parse(costs_to_json(COSTS, facts=OWN)).facts == OWN
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=2), COSTS)
    assert plan_from_json(plan_to_json(timeline, more={"facts": OWN})).facts == OWN
    layers = {"layers": "t", "parts": {"t": {"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1}}, "facts": OWN}
    assert CostsFile.parse(json.dumps(layers)).facts == OWN


@pytest.mark.parametrize("facts", [3, [1], {"gpu": None}, {"num_layers": 1.5}, {"gpu": ["h100"]}])
def test_other_values_are_refused(facts: Any) -> None:
    content = {**json.loads(costs_to_json(COSTS)), "facts": facts}
    with pytest.raises(UserError, match="facts must be an object of facts, each a string, a whole number, true or"):
        CostsFile.parse(json.dumps(content))


def test_differences_are_in_words() -> None:
    other = {"num_layers": 32, "sequence_parallel": False, "hidden_size": 64}
    found = ["layers: 24 there, 32 here", "sequence parallelism: yes there, no here"]
    assert differences(OWN, other) == found, "what only one has is not compared"
    assert all_differences(OWN, other) == [
        found[0],
        "hidden size: unknown there, 64 here",
        found[1],
        "GPU: h100 there, unknown here",
    ]
    assert differences({}, other) == []
    assert listed(["a", "b", "c", "d", "e", "f"]) == "a; b; c; d; and 2 more"


def test_names_are_unique() -> None:
    assert len({fact.name for fact in FACTS}) == len({fact.words for fact in FACTS}) == len(FACTS)

"""The figures of vocabulary parallelism, which are per rank, in a costs file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile, costs_to_json

STAGES = {"forward_ms": 1.0, "backward_ms": 1.0, "wgrad_ms": 1.0}


def parse(**keys: object) -> CostsFile:
    return CostsFile.parse(json.dumps({**STAGES, **keys}))


def test_one_number_is_for_every_rank_whatever_the_number_of_stages() -> None:
    file = parse(output_ms=0.5, output_wgrad_ms=[0.25, 0.75], collective_ms=0.125, activation=8, wgrad=4, logits=2)
    for placement in (Placement.linear(2), Placement.vee(2)):
        costs, memory = file.on(placement)
        assert costs.vocabulary == VocabularyCosts((0.5, 0.5), (0.25, 0.75), collective_ms=0.125)
        assert memory is not None and memory.logits == (2.0, 2.0)


@pytest.mark.parametrize("logits", [(), (2.0, 3.0)])
def test_figures_round_trip(logits: tuple[float, ...]) -> None:
    placement = Placement.linear(2)
    vocabulary = VocabularyCosts((0.5, 0.75), (0.25, 0.5), (0.0, 0.125), (0.25, 0.0), 0.375)
    costs = replace(PassCosts.uniform(placement, 1.0, 2.0, 3.0), vocabulary=vocabulary)
    memory = replace(PassMemory.uniform(placement, 8.0, 4.0), logits=logits)
    assert CostsFile.parse(costs_to_json(costs, memory)).on(placement) == (costs, memory)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"output_ms": 1.0}, r"output_ms needs output_wgrad_ms as well, one number for every rank"),
        ({"embedding_ms": 1.0}, r"embedding_ms needs output_ms as well"),
        ({"collective_ms": 1.0}, r"collective_ms needs output_ms as well"),
        ({"output_ms": 1, "output_wgrad_ms": -1}, r"output_wgrad_ms must be a finite number, 0 or above; got -1"),
        ({"output_ms": [1, "x"], "output_wgrad_ms": 1}, r"output_ms of rank 1 must be a finite number"),
        ({"output_ms": 1, "output_wgrad_ms": 1e16}, r"output_wgrad_ms must be at most 1e\+15"),
        ({"output_ms": 1, "output_wgrad_ms": 1, "logits": 1}, "logits needs activation as well"),
        ({"output_ms": 1, "output_wgrad_ms": 1, "activation": 1, "wgrad": 1, "logits": "x"}, "logits must be a finite"),
    ],
)
def test_invalid_figures_are_rejected(keys: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(**keys)


def test_another_number_of_ranks_is_rejected() -> None:
    file = parse(output_ms=[1, 2, 3], output_wgrad_ms=1, activation=1, wgrad=1, logits=[1, 2, 3])
    with pytest.raises(UserError, match="output_ms must have one figure for each of the 2 ranks; got 3; give as many"):
        file.on(Placement.linear(2))

"""Costs for decisions before anything has been measured."""

from __future__ import annotations

from dataclasses import replace

from megatron.zero_bubble.core.costs.passes import PassCosts
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.ir import Placement


def even_costs(placement: Placement) -> PassCosts:
    """Passes of equal length, and shorter ones of the vocabulary."""
    costs = PassCosts.uniform(placement, 1.0, 1.0, 1.0)
    return replace(costs, vocabulary=VocabularyCosts.uniform(placement.num_ranks, 0.25, 0.25))

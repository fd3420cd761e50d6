"""Read and write figures of costs by the table of their terms (``core/costs/terms.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.zero_bubble.core.costs.memory import PassMemory
from megatron.zero_bubble.core.costs.passes import PassCosts
from megatron.zero_bubble.core.costs.terms import BY_KEY, OF, REQUIRED, TERMS, Figure, Owner
from megatron.zero_bubble.core.costs.units import refuse_huge
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement

LINKS = "links"
OF_RANKS: tuple[Owner, ...] = ("vocabulary",)
"""The values of costs that ranks have, besides those that their stages have."""


def costs_content(costs: PassCosts, memory: PassMemory | None) -> dict[str, Any]:
    """Return the figures of costs and memory by the keys of a file."""
    links = [[source, destination, ms] for (source, destination), ms in costs.links.items()]
    of_ranks = written("vocabulary", costs.vocabulary)
    return {**written("passes", costs), LINKS: links, **written("memory", memory), **of_ranks}


def with_ranks(costs: PassCosts, figures: Mapping[str, Figure], placement: Placement) -> PassCosts:
    """Return costs of stages with those that ranks have: the passes of a divided vocabulary.

    Raises:
        UserError: for a list with another number of ranks.
    """
    of_ranks = figures_on(figures, "vocabulary", placement)
    return replace(costs, vocabulary=VocabularyCosts(**of_ranks) if of_ranks else None)


def written(owner: Owner, costs: object) -> dict[str, Any]:
    """Return the figures of one value of costs by the keys of a file.

    Those that may be missing are left out where they are 0, but for ``comm_ms``, which every run measures.
    """
    found: dict[str, Any] = {}
    for term in OF[owner] if costs is not None else ():
        value = getattr(costs, term.field)
        is_needed = term.missing == REQUIRED or term.key == "comm_ms"
        # Without the share of B, that would follow from the share of F.
        is_needed |= term.key == "backward_attention" and "attention" in found
        if is_needed or (any(value) if isinstance(value, tuple) else value):
            found[term.key] = list(value) if isinstance(value, tuple) else value
    return found


def figures_from(content: Mapping[str, Any], *owners: Owner) -> dict[str, Figure]:
    """Read the figures of some values of costs, by key.

    Raises:
        UserError: for a figure of another form, or without one that it needs.
    """
    figures = {}
    for term in TERMS:
        if term.owner not in owners or term.key not in content:
            continue
        value = content[term.key]
        for one in value if isinstance(value, list) else [value]:
            refuse_huge(**{term.key: one})
        figures[term.key] = term.checked(value)
        for key in term.needed:
            if key not in content:
                raise UserError(f"{term.key} needs {key} as well, {BY_KEY[key].form}; it is missing")
    return figures


def figures_on(figures: Mapping[str, Figure], owner: Owner, placement: Placement) -> dict[str, Any]:
    """Return the figures of one value of costs on a placement, by field.

    Raises:
        UserError: for a list with another number of stages or ranks.
    """
    return {term.field: term.on(figures, placement) for term in OF[owner] if term.key in figures}

"""Tables of the terms of costs and of the other keys of a costs file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron.zero_bubble.core.costs.terms import REQUIRED, TERMS, Term
from megatron.zero_bubble.core.formats.cost_keys import COST_KEYS
from site_parts.markdown import code, table

_UNITS = {"ms": "ms", "memory": "bytes", "share": "0 to 1", "tokens": "tokens"}


def terms() -> str:
    """What every term counts, and what becomes of it."""
    rows = [
        (
            code(term.key),
            term.per,
            _UNITS[term.unit],
            _missing(term),
            _recut(term),
            "yes" if term.of_layer else "",
            term.meaning,
        )
        for term in TERMS
    ]
    return table(("key", "per", "unit", "if missing", "other stages", "per layer", "meaning"), rows)


def _missing(term: Term) -> str:
    needed = " and ".join(map(code, term.needed))
    if term.missing == REQUIRED:
        return "required" if term.owner == "passes" else f"unknown{needed and f', as is {needed}'}"
    return f"{term.missing:g}{needed and f'; needs {needed}'}"


def _recut(term: Term) -> str:
    if term.per != "stage":
        return "kept"
    return "averaged" if term.weighed_by else "added"


def of_section(section: str) -> str:
    """The keys whose values are not one figure."""
    rows = [(code(key.name), key.form, key.meaning) for key in COST_KEYS if key.section == section]
    return table(("key", "type", "meaning"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "cost-terms": terms,
    **{f"cost-keys-{section}": partial(of_section, section) for section in ("passes", "layers")},
}

"""The costs file.

A costs file is JSON with the keys ``forward_ms``, ``backward_ms``, ``wgrad_ms``, ``comm_ms`` and, optionally, ``links``
(a list of ``[source rank, destination rank, ms]``) and both of ``activation`` and ``wgrad`` (memory). Each figure of a
pass is either one number, for a rank's whole share, or a list with one number per stage. A list for another number of
chunks per rank is converted, as ``PassCosts.fit`` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.zero_bubble.costs.memory import MEMORY, PassMemory
from megatron.zero_bubble.costs.passes import TIMES, PassCosts
from megatron.zero_bubble.costs.units import checked_figure, checked_figures, recut, refuse_huge, spread
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.formats.files import json_object, read_file
from megatron.zero_bubble.ir import Placement

_KEYS = frozenset((*TIMES, *MEMORY, "comm_ms", "links"))


def costs_to_json(costs: PassCosts, memory: PassMemory | None = None) -> str:
    """A costs file with one figure per stage; ``costs_from_json`` reads it back unchanged."""
    content: dict[str, Any] = {name: list(getattr(costs, name)) for name in TIMES}
    content["comm_ms"] = costs.comm_ms
    content["links"] = [[source, destination, ms] for (source, destination), ms in costs.links.items()]
    if memory is not None:
        content |= {name: list(getattr(memory, name)) for name in MEMORY}
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in content.items()) + "\n}\n"


def costs_from_json(text: str, placement: Placement) -> tuple[PassCosts, PassMemory | None]:
    """Read a costs file's text for the stages of ``placement``; no memory when the file gives none.

    Raises:
        UserError: one sentence saying which key is wrong and how it is written.
    """
    content = json_object(text)
    if unknown := sorted(content.keys() - _KEYS):
        raise UserError(f"it may have the keys {', '.join(sorted(_KEYS))}; got {unknown[0]!r}; remove or rename it")
    for name in content.keys() - {"links"}:
        values = content[name] if isinstance(content[name], list) else [content[name]]
        for value in values:
            refuse_huge(**{name: value})
    f, b, w = (_per_stage(content, name, placement) for name in TIMES)
    costs = PassCosts(f, b, w, content.get("comm_ms", 0.0), _links(content.get("links", [])))
    if not content.keys() & set(MEMORY):
        return costs, None
    activation, wgrad = (_per_stage(content, name, placement) for name in MEMORY)
    return costs, PassMemory(activation, wgrad)


def read_costs_file(path: str | Path, placement: Placement) -> tuple[PassCosts, PassMemory | None]:
    """``costs_from_json`` of a file; its ``UserError`` names the file."""
    return read_file(path, "costs file", lambda text: costs_from_json(text, placement))


def _per_stage(content: Mapping[str, Any], name: str, placement: Placement) -> tuple[float, ...]:
    if name not in content:
        raise UserError(f"it must give {name}, one number a rank or a list with one a stage; it is missing")
    value = content[name]
    if not isinstance(value, list):
        return spread(placement, checked_figure(name, value))
    if len(value) == placement.num_stages:
        return checked_figures(name, value)
    if not value or len(value) % placement.num_ranks:
        raise UserError(
            f"{name} must have one figure for each of the {placement.num_stages} stages; got {len(value)}; "
            "give a single number to mean every rank's whole share"
        )
    return recut(checked_figures(name, value), placement.num_stages)


def _links(rows: object) -> dict[tuple[int, int], float]:
    links = {}
    for row in rows if isinstance(rows, list) else [rows]:
        if not (isinstance(row, list) and len(row) == 3 and type(row[0]) is int and type(row[1]) is int):
            raise UserError(f"links must be a list of [source rank, destination rank, ms]; got {row!r}")
        refuse_huge(links=row[2])
        links[row[0], row[1]] = row[2]
    return links

"""The costs file.

A costs file is JSON with the keys ``forward_ms``, ``backward_ms``, ``wgrad_ms`` and, optionally, ``comm_ms``, ``links``
(a list of ``[source rank, destination rank, ms]``) and both ``activation`` and ``wgrad`` (memory). Each figure of a
pass is either one number, for a rank's whole share of the model, or a list with one number per stage. A list for
another number of chunks per rank is converted, as ``PassCosts.fit`` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.zero_bubble.costs.memory import MEMORY, PassMemory
from megatron.zero_bubble.costs.passes import TIMES, PassCosts
from megatron.zero_bubble.costs.units import checked_figure, checked_figures, recut, refuse_huge, spread
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.formats.files import json_object, naming, read_file
from megatron.zero_bubble.ir import Placement

Figure = float | tuple[float, ...]
"""A figure as written in the file: one number, for a rank's whole share, or one number per stage."""

_KEYS = frozenset((*TIMES, *MEMORY, "comm_ms", "links"))
_WHAT = "costs file"


def costs_to_json(costs: PassCosts, memory: PassMemory | None = None) -> str:
    """Write a costs file with one figure per stage; ``CostsFile.parse`` reads it back unchanged."""
    content: dict[str, Any] = {name: list(getattr(costs, name)) for name in TIMES}
    content["comm_ms"] = costs.comm_ms
    content["links"] = [[source, destination, ms] for (source, destination), ms in costs.links.items()]
    if memory is not None:
        content |= {name: list(getattr(memory, name)) for name in MEMORY}
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in content.items()) + "\n}\n"


@dataclass(frozen=True)
class CostsFile:
    """The checked content of a costs file; ``on(placement)`` returns its figures per stage of a placement.

    Attributes:
        times: figures of the passes, by key.
        memory: figures of memory, by key; None when the file has none.
        comm_ms: duration of a transfer between two ranks.
        links: as in ``PassCosts``.
        path: path of the file, for error messages.
    """

    times: Mapping[str, Figure]
    memory: Mapping[str, Figure] | None
    comm_ms: float
    links: Mapping[tuple[int, int], float]
    path: str | Path | None = None

    @classmethod
    def parse(cls, text: str) -> CostsFile:
        """Read the text of a costs file.

        Raises:
            UserError: when a key is invalid; the message states its required form.
        """
        content = json_object(text)
        if unknown := sorted(content.keys() - _KEYS):
            raise UserError(f"allowed keys are {', '.join(sorted(_KEYS))}; got {unknown[0]!r}; remove or rename it")
        for name in content.keys() - {"links"}:
            values = content[name] if isinstance(content[name], list) else [content[name]]
            for value in values:
                refuse_huge(**{name: value})
        times = {name: _figure(content, name) for name in TIMES}
        comm_ms = checked_figure("comm_ms", content.get("comm_ms", 0.0))
        links = _links(content.get("links", []))
        memory = {name: _figure(content, name) for name in MEMORY} if content.keys() & set(MEMORY) else None
        return cls(times, memory, comm_ms, links)

    def on(self, placement: Placement) -> tuple[PassCosts, PassMemory | None]:
        """Return the costs of the stages of ``placement``, and their memory if the file has any.

        Raises:
            UserError: for lists with another number of stages, a link that is not a time, or an activation of 0.
        """
        with nullcontext() if self.path is None else naming(_WHAT, self.path):
            f, b, w = (_per_stage(name, self.times[name], placement) for name in TIMES)
            costs = PassCosts(f, b, w, self.comm_ms, self.links)
            if self.memory is None:
                return costs, None
            activation, wgrad = (_per_stage(name, self.memory[name], placement) for name in MEMORY)
            return costs, PassMemory(activation, wgrad)


def read_costs_file(path: str | Path) -> CostsFile:
    """Read a costs file with ``CostsFile.parse``; errors, including those of ``on``, name the file."""
    return replace(read_file(path, _WHAT, CostsFile.parse), path=path)


def _figure(content: Mapping[str, Any], name: str) -> Figure:
    if name not in content:
        raise UserError(f"it must have the key {name}, one number or a list with one number per stage; it is missing")
    value = content[name]
    return checked_figures(name, value) if isinstance(value, list) else checked_figure(name, value)


def _per_stage(name: str, figure: Figure, placement: Placement) -> tuple[float, ...]:
    if isinstance(figure, float):
        return spread(placement, figure)
    if len(figure) == placement.num_stages:
        return figure
    if not figure or len(figure) % placement.num_ranks:
        raise UserError(
            f"{name} must have one figure for each of the {placement.num_stages} stages; got {len(figure)}; "
            "give as many, or a single number for the whole share of each rank"
        )
    return recut(figure, placement.num_stages)


def _links(rows: object) -> dict[tuple[int, int], float]:
    links = {}
    for row in rows if isinstance(rows, list) else [rows]:
        if not (isinstance(row, list) and len(row) == 3 and type(row[0]) is int and type(row[1]) is int):
            raise UserError(f"links must be a list of [source rank, destination rank, ms]; got {row!r}")
        refuse_huge(links=row[2])
        links[row[0], row[1]] = row[2]
    return links

"""What a pass costs: time in ms, and memory.

Figures on the command line are per rank, for the rank's whole share of the model; ``uniform`` spreads them over the
rank's chunks. Inside, every stage has its own figure. ``BW = B + W`` is defined here and nowhere else.

A costs file is JSON with the keys ``forward_ms``, ``backward_ms``, ``wgrad_ms``, ``comm_ms`` and, optionally, ``links``
(a list of ``[source rank, destination rank, ms]``) and both of ``activation`` and ``wgrad`` (memory). Each figure of a
pass is either one number, a rank's whole share, or a list with one number a stage; a list for another number of chunks
a rank is cut anew, as ``fit`` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.zero_bubble.files import json_object, read_file
from megatron.zero_bubble.ir import Kind, Pass, Placement

_TIMES = ("forward_ms", "backward_ms", "wgrad_ms")
_MEMORY = ("activation", "wgrad")
MOST = 1e15
"""Nobody measures more, in whatever unit, and no sum or product of what is less overflows."""
_KEYS = frozenset((*_TIMES, *_MEMORY, "comm_ms", "links"))


@dataclass(frozen=True)
class PassCosts:
    """Milliseconds of every stage's F, B and W, and of a transfer between two ranks.

    ``links`` overrides ``comm_ms`` for (source rank, destination rank). A transfer is pure latency: it delays the
    receiver and occupies nobody.

    Raises:
        ValueError: for a negative or non-finite figure, or when the three lists differ in length.
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    wgrad_ms: tuple[float, ...]
    comm_ms: float = 0.0
    links: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in _TIMES:
            object.__setattr__(self, name, _figures(name, getattr(self, name)))
        _same_length(self, _TIMES)
        object.__setattr__(self, "comm_ms", _figure("comm_ms", self.comm_ms))
        links = {link: _figure(f"links{list(link)}", ms) for link, ms in self.links.items()}
        object.__setattr__(self, "links", links)

    @classmethod
    def uniform(
        cls, placement: Placement, forward_ms: float, backward_ms: float, wgrad_ms: float, comm_ms: float = 0.0
    ) -> PassCosts:
        """Every rank costs the same; each of its chunks gets an equal part of the rank's figures.

        Raises:
            ValueError: also for a figure above ``MOST``.
        """
        refuse_huge(forward_ms=forward_ms, backward_ms=backward_ms, wgrad_ms=wgrad_ms, comm_ms=comm_ms)
        f, b, w = (_spread(placement, ms) for ms in (forward_ms, backward_ms, wgrad_ms))
        return cls(f, b, w, comm_ms)

    @property
    def num_stages(self) -> int:
        return len(self.forward_ms)

    def fit(self, placement: Placement) -> PassCosts:
        """The same model cut into the stages of ``placement``: a stage is halved evenly, neighbours are joined.

        Raises:
            ValueError: when the one number of stages is no multiple of the other.
        """
        f, b, w = (_recut(getattr(self, name), placement.num_stages) for name in _TIMES)
        return PassCosts(f, b, w, self.comm_ms, self.links)

    def duration(self, p: Pass, num_slices: int = 1) -> float:
        """Milliseconds of ``p``; the slices of a sequence share its microbatch's time evenly."""
        if p.kind is Kind.F:
            whole = self.forward_ms[p.stage]
        elif p.kind is Kind.B:
            whole = self.backward_ms[p.stage]
        elif p.kind is Kind.W:
            whole = self.wgrad_ms[p.stage]
        else:
            whole = self.backward_ms[p.stage] + self.wgrad_ms[p.stage]
        return whole / num_slices

    def comm(self, source_rank: int, destination_rank: int) -> float:
        """Milliseconds from the end of a pass on one rank to its result on another; nothing within a rank."""
        if source_rank == destination_rank:
            return 0.0
        return self.links.get((source_rank, destination_rank), self.comm_ms)


@dataclass(frozen=True)
class PassMemory:
    """What one microbatch keeps on every stage, in any one unit (bytes, or parts of a microbatch).

    F adds ``activation`` at its start, the end of B leaves ``wgrad`` for W, the end of W (or of BW) leaves nothing:
    the Zero Bubble paper's M_B and M_W (arXiv 2401.10241, section 2).

    Raises:
        ValueError: for a figure that is negative or not finite, an ``activation`` of zero, or lists of two lengths.
    """

    activation: tuple[float, ...]
    wgrad: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in _MEMORY:
            object.__setattr__(self, name, _figures(name, getattr(self, name)))
        _same_length(self, _MEMORY)
        if 0.0 in self.activation:
            raise ValueError("activation memory must be above 0, because peaks are counted in units of it; got 0")

    @classmethod
    def uniform(cls, placement: Placement, activation: float = 1.0, wgrad: float | None = None) -> PassMemory:
        """Every rank keeps the same; ``wgrad`` is ``activation`` unless given, the most that W may have to keep.

        Raises:
            ValueError: also for a figure above ``MOST``.
        """
        kept = activation if wgrad is None else wgrad
        refuse_huge(activation=activation, wgrad=kept)
        return cls(_spread(placement, activation), _spread(placement, kept))

    @property
    def num_stages(self) -> int:
        return len(self.activation)

    def fit(self, placement: Placement) -> PassMemory:
        """The same model cut into the stages of ``placement``, as ``PassCosts.fit`` does."""
        return PassMemory(*(_recut(getattr(self, name), placement.num_stages) for name in _MEMORY))

    def delta(self, p: Pass, num_slices: int = 1) -> float:
        """By how much ``p`` changes what its stage keeps; F's part is due at its start, the others' at their end."""
        activation, wgrad = self.activation[p.stage] / num_slices, self.wgrad[p.stage] / num_slices
        return {Kind.F: activation, Kind.B: wgrad - activation, Kind.W: -wgrad, Kind.BW: -activation}[p.kind]


def costs_to_json(costs: PassCosts, memory: PassMemory | None = None) -> str:
    """A costs file with one figure a stage; ``costs_from_json`` reads it back unchanged."""
    content: dict[str, Any] = {name: list(getattr(costs, name)) for name in _TIMES}
    content["comm_ms"] = costs.comm_ms
    content["links"] = [[source, destination, ms] for (source, destination), ms in costs.links.items()]
    if memory is not None:
        content |= {name: list(getattr(memory, name)) for name in _MEMORY}
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in content.items()) + "\n}\n"


def costs_from_json(text: str, placement: Placement) -> tuple[PassCosts, PassMemory | None]:
    """Read a costs file's text for the stages of ``placement``; no memory when the file gives none.

    Raises:
        ValueError: one sentence saying which key is wrong and how it is written.
    """
    content = json_object(text)
    if unknown := sorted(content.keys() - _KEYS):
        raise ValueError(f"it may have the keys {', '.join(sorted(_KEYS))}; got {unknown[0]!r}; remove or rename it")
    for name in content.keys() - {"links"}:
        values = content[name] if isinstance(content[name], list) else [content[name]]
        for value in values:
            refuse_huge(**{name: value})
    f, b, w = (_per_stage(content, name, placement) for name in _TIMES)
    costs = PassCosts(f, b, w, content.get("comm_ms", 0.0), _links(content.get("links", [])))
    if not content.keys() & set(_MEMORY):
        return costs, None
    activation, wgrad = (_per_stage(content, name, placement) for name in _MEMORY)
    return costs, PassMemory(activation, wgrad)


def read_costs_file(path: str | Path, placement: Placement) -> tuple[PassCosts, PassMemory | None]:
    """``costs_from_json`` of a file; its ``ValueError`` names the file."""
    return read_file(path, "costs file", lambda text: costs_from_json(text, placement))


def refuse_huge(**figures: object) -> None:
    """``ValueError`` for a number above ``MOST``; what is no finite number at all is somebody else's to refuse."""
    for name, value in figures.items():
        if isinstance(value, (int, float)) and MOST < value < math.inf:
            raise ValueError(f"{name} must be at most {MOST:g}; got {value!r}; give a smaller one")


def _figure(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number, 0 or above; got {value!r}")
    return float(value)


def _figures(name: str, values: Sequence[object]) -> tuple[float, ...]:
    return tuple(_figure(f"{name} of stage {stage}", value) for stage, value in enumerate(values))


def _same_length(owner: object, names: Sequence[str]) -> None:
    lengths = {name: len(getattr(owner, name)) for name in names}
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"every list must have one figure a stage; {got}; make them equally long")


def _spread(placement: Placement, whole: float) -> tuple[float, ...]:
    """A rank's figure over its chunks, as one figure a stage."""
    return tuple(whole / len(placement.stages_of(rank)) for rank in placement.stage_to_rank)


def _recut(figures: tuple[float, ...], num_stages: int) -> tuple[float, ...]:
    """Figures a stage of one cut of the model as figures a stage of another."""
    finer, coarser = max(num_stages, len(figures)), min(num_stages, len(figures))
    if finer % coarser:
        raise ValueError(
            f"figures for {len(figures)} stages cannot be cut into {num_stages}: the one must be a multiple of the "
            "other; measure, or give, a figure for each stage"
        )
    parts = finer // coarser
    if num_stages >= len(figures):
        return tuple(figure / parts for figure in figures for _ in range(parts))
    return tuple(sum(figures[s * parts : (s + 1) * parts]) for s in range(num_stages))


def _per_stage(content: Mapping[str, Any], name: str, placement: Placement) -> tuple[float, ...]:
    if name not in content:
        raise ValueError(f"it must give {name}, one number a rank or a list with one a stage; it is missing")
    value = content[name]
    if not isinstance(value, list):
        return _spread(placement, _figure(name, value))
    if len(value) == placement.num_stages:
        return _figures(name, value)
    if not value or len(value) % placement.num_ranks:
        raise ValueError(
            f"{name} must have one figure for each of the {placement.num_stages} stages; got {len(value)}; "
            "give a single number to mean every rank's whole share"
        )
    return _recut(_figures(name, value), placement.num_stages)


def _links(rows: object) -> dict[tuple[int, int], float]:
    links = {}
    for row in rows if isinstance(rows, list) else [rows]:
        if not (isinstance(row, list) and len(row) == 3 and type(row[0]) is int and type(row[1]) is int):
            raise ValueError(f"links must be a list of [source rank, destination rank, ms]; got {row!r}")
        refuse_huge(links=row[2])
        links[row[0], row[1]] = row[2]
    return links

"""The part of a costs file that gives costs per layer.

``"layers"`` lists the kinds of the layers in model order, where ``"moe*58"`` stands for 58 layers of the kind ``moe``;
for a hybrid model it is the pattern of its layers, such as ``"M-M*"``, whose letters are the kinds.
``"parts"`` has the figures of every kind, and, optionally, those of ``embedding`` and ``loss`` (the output layer with
the loss). With figures of stages and ``layers_per_stage``, these two are keys of the file itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures
from megatron.zero_bubble.core.costs.passes import backward_share
from megatron.zero_bubble.core.costs.terms import MEMORY, OF_LAYER, TIMES
from megatron.zero_bubble.core.costs.units import refuse_no_time
from megatron.zero_bubble.core.errors import UserError, explaining, nearest
from megatron.zero_bubble.core.ir.sizes import MOST_LAYERS

LAYERS, PARTS = "layers", "parts"
ENDS = ("embedding", "loss")
_FIELDS = {term.key: term.field for term in OF_LAYER}
"""The keys of a part, and the fields of ``LayerFigures`` that they give."""


def layers_from(content: Mapping[str, Any], shared: Mapping[str, Any]) -> LayerCosts:
    """Read the keys ``layers`` and ``parts``. Without memory figures, all layers keep the same.

    Args:
        shared: the figures that all stages share, by the fields of ``LayerCosts``.

    Raises:
        UserError: when one of them is missing or invalid; the message states its required form.
    """
    parts = content.get(PARTS)
    if not isinstance(parts, dict) or not all(isinstance(part, dict) for part in parts.values()):
        raise UserError(f"{PARTS} must be an object with the figures of every kind of layer; got {parts!r:.40}")
    kinds = _kinds(content.get(LAYERS))
    known = sorted(parts.keys() - set(ENDS))
    for kind in kinds:
        if kind not in known:
            raise UserError(f"{LAYERS} must name kinds of {PARTS}, which are {', '.join(known)}; got {kind!r}")
    if unused := sorted(parts.keys() - {*kinds, *ENDS}):
        raise UserError(f"every kind in {PARTS} must occur in {LAYERS}; {unused[0]!r} does not; remove it")
    with_memory = any(part.keys() & {*MEMORY} for part in parts.values())
    read = {kind: _part(kind, part, with_memory) for kind, part in parts.items()}
    embedding, loss = (read.get(end, LayerFigures()) for end in ENDS)
    refuse_no_time(*(getattr(part, name) for part in read.values() for name in TIMES))
    return LayerCosts(tuple(read[kind] for kind in kinds), embedding, loss, **shared)


def ends_from(content: Mapping[str, Any]) -> dict[str, LayerFigures]:
    """Read the keys ``embedding`` and ``loss`` of a file with figures of stages, each of which is optional.

    Raises:
        UserError: when one of them is invalid, or there is no ``layers_per_stage``.
    """
    for end in ENDS:
        if end in content and "layers_per_stage" not in content:
            raise UserError(
                f"{end} needs layers_per_stage, by which the rest of its stage is divided; add it, or remove {end}"
            )
        if end in content and not isinstance(content[end], dict):
            raise UserError(f"{end} must be an object with the figures of one kind of part; got {content[end]!r:.40}")
    return {end: _part(end, content[end], with_memory=False) for end in ENDS if end in content}


def ends_content(layers: LayerCosts) -> dict[str, dict[str, float]]:
    """Return the keys that ``ends_from`` reads."""
    return {end: _figures(getattr(layers, end)) for end in ENDS}


def _figures(part: LayerFigures) -> dict[str, float]:
    """The figures of a part that are not 0, by the keys of the file."""
    return {key: figure for key, name in _FIELDS.items() if (figure := getattr(part, name))}


def _kinds(listed: object) -> list[str]:
    """Return the kind of every layer."""
    rows = listed if isinstance(listed, list) else [None]
    runs: list[tuple[str, int]] = []
    if isinstance(listed, str):
        rows, runs = [], [(letter, 1) for letter in listed]
    for row in rows:
        match = re.fullmatch(r"([^*]+)(?:\*([1-9][0-9]{0,4}))?", row) if isinstance(row, str) else None
        if match is None:
            raise UserError(
                f'{LAYERS} must be a list of kinds in the order of the model, such as ["dense*3", "moe*58"], or the '
                f'pattern of a hybrid model, such as "M-M*"; got {row if isinstance(listed, list) else listed!r}'
            )
        runs.append((match[1], int(match[2] or 1)))
    num_layers = sum(count for _, count in runs)
    if not 0 < num_layers <= MOST_LAYERS:
        raise UserError(f"{LAYERS} must have 1 to {MOST_LAYERS} layers; got {num_layers}")
    return [kind for kind, count in runs for _ in range(count)]


def _part(kind: str, figures: Mapping[str, Any], with_memory: bool) -> LayerFigures:
    """Read the figures of one kind; those of a layer must have all times, and memory if any part has."""
    is_layer = kind not in ENDS
    if unknown := sorted(figures.keys() - _FIELDS.keys()):
        if (meant := nearest(unknown[0], tuple(_FIELDS))) is not None:
            raise UserError(
                f"keys of {PARTS}.{kind} must be figures of layers; got {unknown[0]!r}; did you mean {meant}? "
                "rename or remove it"
            )
        raise UserError(
            f"allowed keys of {PARTS}.{kind} are {', '.join(_FIELDS)}; got {unknown[0]!r}; remove or rename it"
        )
    for name in (*TIMES, *(MEMORY if with_memory else ())) if is_layer else ():
        if name not in figures:
            raise UserError(f"{PARTS}.{kind} must have the key {name}, a number; it is missing")
    given = {_FIELDS[key]: figure for key, figure in figures.items()}
    if is_layer and not with_memory:
        given |= dict.fromkeys(MEMORY, 1.0)
    with explaining(f"{PARTS}.{kind}: "):
        part = LayerFigures(**given)
    if is_layer and not part.activation:
        raise UserError(f"{PARTS}.{kind}: activation memory must be above 0, because it is the unit of peaks; got 0")
    if "backward_attention" in figures:
        return part
    return replace(part, backward_attention=backward_share(part.forward_attention, part.forward_ms, part.backward_ms))

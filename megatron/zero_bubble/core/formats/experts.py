"""The key ``experts`` of a costs file: the all-to-alls of the layers with experts, and the computation of the experts.

    "experts": {
      "layers": 8,
      "forward": {"dispatch_ms": 26.8, "experts_ms": 15.6, "combine_ms": 34.7},
      "backward": {"combine_ms": 23.1, "experts_ms": 18.0, "dispatch_ms": 30.0},
      "wgrad": {"experts_ms": 17.2},
      "contention": 1.18
    }

Every figure is one number, for a rank's whole share of the model, or a list with one number per stage, as those of the
passes, which include them: what a pass takes besides is attention and all else. The times are those of a pass that runs
alone. ``contention`` is the factor by which computation is slower next to an all-to-all (default: 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.zero_bubble.core.costs.experts import ExpertParts
from megatron.zero_bubble.core.costs.passes import PassCosts
from megatron.zero_bubble.core.costs.terms import TIMES, Figure
from megatron.zero_bubble.core.costs.units import checked_figure, checked_figures
from megatron.zero_bubble.core.errors import UserError

EXPERTS = "experts"
_LAYERS, _CONTENTION = "layers", "contention"
_OF_PASSES = {
    "forward": {"dispatch_ms": "dispatch", "experts_ms": "experts", "combine_ms": "combine"},
    "backward": {"combine_ms": "combine_grad", "experts_ms": "experts_grad", "dispatch_ms": "dispatch_grad"},
    "wgrad": {"experts_ms": "experts_wgrad"},
}
"""The keys of every pass, and the field of ``ExpertParts`` that each gives."""
_RESTS = {"forward": "attention", "backward": "attention_grad", "wgrad": "attention_wgrad"}

PerStage = Callable[[str, Figure], tuple[float, ...]]
"""Converts a figure, given its name, to one number per stage of a placement."""


@dataclass(frozen=True)
class ExpertFigures:
    """What a costs file has about experts.

    Attributes:
        layers: the number of layers with experts.
        times: figures by field of ``ExpertParts``.
        contention: as in ``PassCosts``.
    """

    layers: Figure
    times: Mapping[str, Figure]
    contention: float = 1.0

    def of(self, costs: PassCosts, per_stage: PerStage) -> tuple[ExpertParts, ...]:
        """Return the parts of every stage of ``costs``, whose passes they are parts of.

        Raises:
            UserError: when the parts of a pass take longer than the pass.
        """
        found = {field: per_stage(f"{EXPERTS}.{field}", figure) for field, figure in self.times.items()}
        for pass_, time in zip(_OF_PASSES, TIMES, strict=True):
            whole = getattr(costs, time)
            parts = [
                sum(of_stage) for of_stage in zip(*(found[field] for field in _OF_PASSES[pass_].values()), strict=True)
            ]
            for stage, (all_, part) in enumerate(zip(whole, parts, strict=True)):
                if part > all_ * (1 + 1e-9):
                    raise UserError(
                        f"{time} must include the parts of {EXPERTS}.{pass_}, which take {part:g} ms on stage {stage}; "
                        f"got {all_:g} ms; give the time of the whole pass, all-to-alls included"
                    )
            found[_RESTS[pass_]] = tuple(max(0.0, all_ - part) for all_, part in zip(whole, parts, strict=True))
        layers = per_stage(f"{EXPERTS}.{_LAYERS}", self.layers)
        columns = {"layers": layers, **found}
        return tuple(
            ExpertParts(**{field: column[stage] for field, column in columns.items()}) for stage in range(len(layers))
        )


def experts_from(content: Mapping[str, Any]) -> ExpertFigures | None:
    """Read the key ``experts``; None if the file does not have it.

    Raises:
        UserError: for another form, or a key that is missing or unknown.
    """
    if EXPERTS not in content:
        return None
    given = _object(EXPERTS, content[EXPERTS], (_LAYERS, *_OF_PASSES), (_CONTENTION,))
    times: dict[str, Figure] = {}
    for pass_, fields in _OF_PASSES.items():
        own = _object(f"{EXPERTS}.{pass_}", given[pass_], tuple(fields))
        times |= {field: _figure(f"{EXPERTS}.{pass_}.{key}", own[key]) for key, field in fields.items()}
    contention = checked_figure(f"{EXPERTS}.{_CONTENTION}", given.get(_CONTENTION, 1.0))
    if contention < 1:
        raise UserError(
            f"{EXPERTS}.{_CONTENTION} must be 1 or more, because an all-to-all makes computation no faster; got "
            f"{contention:g}; leave it out for 1"
        )
    layers = _figure(f"{EXPERTS}.{_LAYERS}", given[_LAYERS])
    if not any(layers if isinstance(layers, tuple) else (layers,)):
        raise UserError(
            f"{EXPERTS}.{_LAYERS} must be above 0 on some stage; got {given[_LAYERS]!r}; leave {EXPERTS} out"
        )
    return ExpertFigures(layers, times, contention)


def experts_content(costs: PassCosts) -> dict[str, Any]:
    """Return the key that ``experts_from`` reads; none without experts."""
    if not costs.experts:
        return {}
    own: dict[str, Any] = {_LAYERS: [stage.layers for stage in costs.experts]}
    for pass_, fields in _OF_PASSES.items():
        own[pass_] = {key: [getattr(stage, field) for stage in costs.experts] for key, field in fields.items()}
    return {EXPERTS: own | ({} if costs.contention == 1 else {_CONTENTION: costs.contention})}


def _object(name: str, value: object, keys: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(value, dict) or not set(keys) <= value.keys() <= {*keys, *optional}:
        got = list(value) if isinstance(value, dict) else value
        raise UserError(f"{name} must be an object with the keys {', '.join(keys)}; got {got!r:.80}; correct it")
    return value


def _figure(name: str, value: object) -> Figure:
    return checked_figures(name, value) if isinstance(value, list) else checked_figure(name, value)

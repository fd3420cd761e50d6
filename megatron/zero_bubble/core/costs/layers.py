"""Costs of the parts of a model: its layers, the embedding, and the output layer with the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import fsum
from typing import Any

from megatron.zero_bubble.core.costs.experts import NO_EXPERTS, ExpertParts
from megatron.zero_bubble.core.costs.kinds import of_kinds
from megatron.zero_bubble.core.costs.memory import PassMemory
from megatron.zero_bubble.core.costs.passes import PassCosts
from megatron.zero_bubble.core.costs.terms import MEMORY, OF_LAYER, SHARED, Owner
from megatron.zero_bubble.core.costs.units import refuse_huge
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement

_WEIGHED_BY = {term.field: term.weighed_by for term in OF_LAYER if term.weighed_by}
"""The shares of a stage, which are not sums over its parts, and the time that each is a part of."""
_NEARLY_NOTHING = 1e-3
"""Activation of a stage that keeps nothing known, relative to the largest layer."""
_ROUNDING = 1e-6
"""Relative excess of a part over its stage that rounded figures may have."""
_EXPERTS = "E"
"""The letter of a layer with experts in a hybrid model."""


@dataclass(frozen=True)
class LayerFigures:
    """Figures of one microbatch in one layer, in the embedding, or in the output layer with the loss.

    Attributes:
        forward_ms, backward_ms, wgrad_ms: time of F, B and W in ms.
        activation, wgrad, history, states, captured: memory as in ``PassMemory``: in bytes, or in microbatches.
        forward_attention, backward_attention: shares of attention in F and B, from 0 to 1, as in ``PassCosts``.
        recompute_ms: of ``backward_ms``, the time in ms to compute activations again; ``rebuilt`` is their memory.
        host_ms: time in ms to copy what F saves to host memory, or back; 0 if unknown.
        gather_ms, reduce_ms: time in ms of each collective of sharded units, as in ``PassCosts``; 0 if unknown.

    Raises:
        UserError: for a negative, huge or non-finite figure, or a share above 1.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    wgrad_ms: float = 0.0
    activation: float = 0.0
    wgrad: float = 0.0
    history: float = 0.0
    forward_attention: float = 0.0
    backward_attention: float = 0.0
    host_ms: float = 0.0
    gather_ms: float = 0.0
    reduce_ms: float = 0.0
    captured: float = 0.0
    recompute_ms: float = 0.0
    rebuilt: float = 0.0
    states: float = 0.0

    def __post_init__(self) -> None:
        for term in OF_LAYER:
            value = getattr(self, term.field)
            refuse_huge(**{term.field: value})
            object.__setattr__(self, term.field, term.checked(value, term.field))

    @property
    def work_ms(self) -> float:
        """Time of F, B and W together, in ms."""
        return self.forward_ms + self.backward_ms + self.wgrad_ms

    def kept(self) -> LayerFigures:
        """The same layer with activations that are kept, not computed again."""
        backward = self.backward_ms - self.recompute_ms
        again = self.forward_attention * self.forward_ms if self.recompute_ms else 0.0
        attention = self.backward_attention * self.backward_ms - again
        return replace(
            self,
            backward_ms=backward,
            recompute_ms=0.0,
            activation=self.activation + self.rebuilt,
            rebuilt=0.0,
            backward_attention=min(1.0, max(0.0, attention / backward)) if backward else 0.0,
        )

    def plus(self, *others: LayerFigures) -> LayerFigures:
        """Those of this part and others, as one part."""
        amounts = [_amounts(part) for part in (self, *others)]
        return _part({name: fsum(of[name] for of in amounts) for name in amounts[0]})


@dataclass(frozen=True)
class LayerCosts:
    """The parts of a model in order, for every division of its layers among stages.

    A layout is the number of layers per stage, in model order. The embedding is on the first stage, and the output
    layer with the loss on the last one, unless all ranks divide them.

    Attributes:
        layers: one part per layer, and one for all layers of multi-token prediction, which follow.
        predictions: the layers of multi-token prediction that the last part stands for; 0 for none.
        again: the first layers of every stage that are computed again, where their figures say that they may be; others
            keep their activations, as multi-token prediction does; None for all layers.
        input_memory: memory of a stage's input, which a stage keeps at least, in the unit of ``activation``; 0 if
            unknown.
        recomputed: as in ``PassMemory``.
        comm_ms, links, message_ms: ms, as in ``PassCosts``.
        slice_overhead: share, as in ``PassCosts``.
        experts: the all-to-alls and experts of every layer, which its part includes; empty if no layer has any.
        contention: the factor of ``PassCosts``.
        vocabulary: of a divided vocabulary, the times of its passes, which ``embedding`` and ``loss`` are then without.
        logits: in the unit of memory, as in ``PassMemory``.
    """

    layers: tuple[LayerFigures, ...]
    embedding: LayerFigures = LayerFigures()
    loss: LayerFigures = LayerFigures()
    comm_ms: float = 0.0
    links: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)
    input_memory: float = 0.0
    recomputed: bool = False
    message_ms: float = 0.0
    experts: tuple[ExpertParts, ...] = ()
    contention: float = 1.0
    slice_overhead: float = 0.0
    vocabulary: VocabularyCosts | None = None
    logits: tuple[float, ...] = ()
    predictions: int = 0
    again: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_divided(self) -> bool:
        """Whether all ranks divide the embedding and the output layer."""
        return self.vocabulary is not None

    def divided_as(self, costs: PassCosts, memory: PassMemory | None) -> LayerCosts:
        """The same with a vocabulary that is divided as in these costs of passes, if it is."""
        return replace(self, vocabulary=costs.vocabulary, logits=() if memory is None else memory.logits)

    @cached_property
    def work_ms(self) -> tuple[float, ...]:
        """Time of F, B and W together in ms, per layer."""
        return tuple(layer.work_ms for layer in self.layers)

    def averaged(self) -> LayerCosts:
        """The same model with equal layers, each the mean of all."""
        count = self.num_layers - bool(self.predictions)
        amounts = [_amounts(layer) for layer in self.layers[:count]]
        mean = _part({name: fsum(of[name] for of in amounts) / count for name in amounts[0]})
        experts = self.experts[:count]
        if experts:
            experts = (ExpertParts._make(map(fsum, zip(*experts, strict=True))).divided(count),) * count
        layers = (mean,) * count + self.layers[count:]
        return replace(self, layers=layers, experts=experts + self.experts[count:])

    def rank_work_ms(self, placement: Placement, layout: Sequence[int]) -> tuple[float, ...]:
        """Time of F, B and W of one microbatch in ms, per rank."""
        own = self if self.again is None else self._keeping(layout, self.again)
        per_stage = [fsum(part) for part in own._parts_of(layout, "work_ms")]
        return tuple(fsum(per_stage[s] for s in placement.stages_of(rank)) for rank in range(placement.num_ranks))

    def on(self, layout: Sequence[int]) -> tuple[PassCosts, PassMemory]:
        """Return costs in ms and memory per stage.

        Raises:
            UserError: when the numbers of layers do not add up, or a stage keeps nothing in memory.
        """
        if sum(layout) != self.num_layers or min(layout) < 0:
            raise UserError(
                f"the layers per stage must add up to {self.num_layers}; got {', '.join(map(str, layout))}; change them"
            )
        if self.again is not None:
            return self._keeping(layout, self.again).on(layout)
        passes = PassCosts(**self._terms_on(layout, "passes"), **self.shared, vocabulary=self.vocabulary)
        if self.experts:
            passes = passes.with_experts(tuple(self._experts_on(layout)), self.contention)
        least = self.input_memory or _NEARLY_NOTHING * max(layer.activation for layer in self.layers)
        memory = self._terms_on(layout, "memory")
        memory["activation"] = tuple(max(least, amount) for amount in memory["activation"])
        return passes, PassMemory(**memory, recomputed=self.recomputed, logits=self.logits)

    def _keeping(self, layout: Sequence[int], again: int) -> LayerCosts:
        """The same for one layout, with the figures of layers that keep their activations."""
        layers, experts = list(self.layers), list(self.experts)
        for start, end in pairwise(accumulate(layout, initial=0)):
            for number in range(start, end):
                is_prediction = self.predictions and number == self.num_layers - 1
                if number >= start + again or is_prediction:
                    if experts and layers[number].recompute_ms:
                        experts[number] = experts[number].sending_once()
                    layers[number] = layers[number].kept()
        return replace(self, layers=tuple(layers), experts=tuple(experts), again=None)

    @property
    def shared(self) -> dict[str, Any]:
        """The figures that all stages share, by the fields of ``PassCosts``."""
        return {name: getattr(self, name) for name in (*SHARED, "links")}

    def _terms_on(self, layout: Sequence[int], owner: Owner) -> dict[str, Any]:
        """The figures of every stage, by field."""
        found: dict[str, tuple[float, ...]] = {}
        for name in (term.field for term in OF_LAYER if term.owner == owner):
            found[name] = self._summed(layout, name)
            if name in _WEIGHED_BY:
                whole = self._summed(layout, _WEIGHED_BY[name])
                found[name] = tuple(min(1.0, a / t) if t else 0.0 for a, t in zip(found[name], whole, strict=True))
        return found

    def _experts_on(self, layout: Sequence[int]) -> Iterator[ExpertParts]:
        for start, end in pairwise(accumulate(layout, initial=0)):
            yield ExpertParts._make(map(fsum, zip(NO_EXPERTS, *self.experts[start:end], strict=True)))

    @cached_property
    def _columns(self) -> dict[str, tuple[float, ...]]:
        """Every figure of all parts in model order; instead of a share, the time that it is."""
        parts = (self.embedding, *self.layers, self.loss)
        amounts = [_amounts(part) for part in parts]
        columns = {term.field: tuple(of[term.field] for of in amounts) for term in OF_LAYER}
        return columns | {"work_ms": tuple(part.work_ms for part in parts)}

    def _parts_of(self, layout: Sequence[int], name: str) -> Iterator[tuple[float, ...]]:
        """Yield one figure of all parts on each stage."""
        column, start, last = self._columns[name], 1, len(layout) - 1
        for stage, count in enumerate(layout):
            yield column[start - (stage == 0) : start + count + (stage == last)]
            start += count

    def _summed(self, layout: Sequence[int], name: str) -> tuple[float, ...]:
        # fsum, because the result of sum depends on the version of Python.
        return tuple(map(fsum, self._parts_of(layout, name))) if any(self._columns[name]) else (0.0,) * len(layout)


def stages_of_layers(layout: Sequence[int | str]) -> tuple[int, ...]:
    """The stages that have nothing but layers, from which the costs of a layer are taken; of two stages, the first."""
    last = len(layout) - 1
    return tuple(s for s in (range(1, last) if last > 1 else range(last)) if layout[s])


def of_stages(
    costs: PassCosts,
    memory: PassMemory | None,
    layout: Sequence[int],
    embedding: LayerFigures | None = None,
    loss: LayerFigures | None = None,
    kinds: str = "",
) -> LayerCosts:
    """Derive the parts of a model from figures of its stages; with ``layout``, they give the same figures again.

    The layers of a stage share its figures equally, or in proportion to what layers of their kinds take on all stages
    (``of_kinds``). Where ``embedding`` or ``loss`` is unknown, the layers of its stage are as those between the first
    and the last stage, and it is what the stage takes beyond them. Of only two stages, the first is then assumed to
    take nothing beyond its layers. Without memory figures, all layers keep the same.

    Args:
        kinds: a letter per layer, in model order; empty if all layers are alike. Only those with the letter E have
            experts, if there are any.

    Raises:
        UserError: when the layout is for another number of stages, no stage gives the time of a layer, or ``embedding``
            or ``loss`` takes more than its stage.
    """
    known, last = stages_of_layers(layout), len(layout) - 1
    if len(layout) != costs.num_stages:
        raise UserError(
            f"layers_per_stage must have one number for each of the {costs.num_stages} stages of the lists; got "
            f"{len(layout)}; give as many"
        )
    if not known:
        raise UserError(
            "layers_per_stage must give layers to a stage between the first and the last, or to the first of two, from "
            f"which the time of a layer is taken; got {', '.join(map(str, layout))}; give the costs per layer instead"
        )
    given = {stage: part for stage, part in ((0, embedding), (last, loss)) if part is not None}
    figures = _figures_of(costs, memory)
    for stage, end in given.items():
        for name, amount in _amounts(end).items():
            if name in figures:
                _check_fits("loss" if stage else "embedding", name, amount, figures[name][stage])
                figures[name][stage] = max(0.0, figures[name][stage] - amount)
    letters = kinds or "t" * sum(layout)
    stages = [letters[start:end] for start, end in pairwise(accumulate(layout, initial=0))]
    usual: dict[str, dict[str, float]] = {}
    for name, of in figures.items():
        amount = fsum(of[s] for s in known) / sum(layout[s] for s in known)
        found = of_kinds([of[s] for s in known], [stages[s] for s in known])
        usual[name] = {kind: found.get(kind, amount) for kind in set(letters)}

    def layer(stage: int, kind: str) -> LayerFigures:
        of_stage = {name: _part_of(of[stage], usual[name], kind, stages[stage]) for name, of in figures.items()}
        if stage in (0, last) and stage not in given:  # of an end that takes less than its layers, all is theirs
            of_stage = {name: min(usual[name][kind], own) for name, own in of_stage.items()}
        return _part(of_stage if memory is not None else of_stage | dict.fromkeys(MEMORY, 1.0))

    def beyond(stage: int) -> LayerFigures:
        sums = {name: fsum(own[kind] for kind in stages[stage]) for name, own in usual.items()}
        left = {name: max(0.0, figures[name][stage] - own) for name, own in sums.items()}
        return given[stage] if stage in given else _part(left)

    layers = tuple(layer(stage, kind) for stage, of_stage in enumerate(stages) for kind in of_stage)
    experts = tuple(_experts_of(costs.experts, stages))
    shared = {name: getattr(costs, name) for name in (*SHARED, "links")}
    return LayerCosts(layers, beyond(0), beyond(last), **shared, experts=experts, contention=costs.contention)


def _part_of(amount: float, usual: Mapping[str, float], kind: str, stage: str) -> float:
    """What a layer takes of the amount of its stage."""
    whole = fsum(usual[each] for each in stage)
    return amount * usual[kind] / whole if whole else amount / len(stage)


def _experts_of(experts: Sequence[ExpertParts], stages: Sequence[str]) -> Iterator[ExpertParts]:
    for of_stage, own in zip(stages, experts, strict=False):
        with_experts = of_stage.count(_EXPERTS) or len(of_stage)
        for kind in of_stage:
            has = kind == _EXPERTS or _EXPERTS not in of_stage
            yield own.divided(with_experts) if has else NO_EXPERTS


def _check_fits(end: str, name: str, amount: float, of_stage: float) -> None:
    if name not in _WEIGHED_BY and amount > of_stage * (1 + _ROUNDING):
        raise UserError(
            f"{name} of {end} must be at most that of its stage, which includes it; got {amount:g} and {of_stage:g}; "
            f"give a smaller one, or leave out {end} to have it derived"
        )


def _figures_of(costs: PassCosts, memory: PassMemory | None) -> dict[str, list[float]]:
    """Figures that add up over the parts of a stage, by stage; instead of a share of attention, its time."""
    owners = {"passes": costs, "memory": memory}
    figures = {
        term.field: list(getattr(owner, term.field)) for term in OF_LAYER if (owner := owners[term.owner]) is not None
    }
    times = {share: zip(figures[share], figures[ms], strict=True) for share, ms in _WEIGHED_BY.items()}
    return figures | {share: [a * b for a, b in pairs] for share, pairs in times.items()}


def _amounts(part: LayerFigures) -> dict[str, float]:
    """The figures of one part, as in ``_figures_of``."""
    shares = {share: getattr(part, share) * getattr(part, ms) for share, ms in _WEIGHED_BY.items()}
    return vars(part) | shares


def _part(amounts: Mapping[str, float]) -> LayerFigures:
    shares = {
        share: min(1.0, amounts[share] / amounts[ms]) if amounts[ms] else 0.0 for share, ms in _WEIGHED_BY.items()
    }
    return LayerFigures(**{**amounts, **shares})

"""Bytes of the weights, gradients and optimizer of a model, for any placement and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.predictions import prediction_expert_weights, prediction_weights
from megatron.zero_bubble.core.costs.static import ParameterBytes, StageBytes
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.planning.division import Division

Layout = tuple[int, ...]


class Weights(Protocol):
    """The bytes of weights, gradients and optimizer; a layout of None is the one that a job gets."""

    def of_ranks(self, placement: Placement, layout: Layout | None = None) -> tuple[float, ...]:
        """Bytes per rank, as its replicas hold them."""

    def of_stages(self, placement: Placement, layout: Layout | None = None) -> StageBytes:
        """Bytes per stage, all on one replica."""

    def of_layers(self) -> Weights:
        """Those without the embedding and the output layer."""


@dataclass(frozen=True)
class ModelWeights:
    """Those of a model.

    Attributes:
        model: the model, whose layers are divided by ``division``.
        parts: bytes per parameter.
        replicas: those that divide the optimizer state of a parameter, and of a parameter of experts.
        predictions: layers of multi-token prediction per stage of the job; empty for a model without.
    """

    model: Model
    division: Division
    parts: ParameterBytes
    replicas: tuple[int, int] = (1, 1)
    predictions: tuple[int, ...] = ()

    @property
    def per_parameter(self) -> tuple[float, float]:
        """Bytes that a rank holds of a parameter of layers, and of a parameter of experts."""
        of_all, of_experts = (self._held(self.parts.of_layers, count) for count in self.replicas)
        return of_all, of_experts

    @property
    def held_text(self) -> str:
        """The same in words."""
        each, of_experts = self.per_parameter
        differs = self.model.experts is not None and of_experts != each
        return f"{each:.3g} bytes per parameter" + (f", those of experts {of_experts:.3g}" if differs else "")

    def of_ranks(self, placement: Placement, layout: Layout | None = None) -> tuple[float, ...]:
        """See ``Weights``; experts have replicas of their own."""
        of_all, of_experts = self.per_parameter
        of_others = self._held(self.parts.weight, self.replicas[0])
        more = prediction_expert_weights(self.model, on_stages(self.predictions, placement))
        experts = map(sum, zip(self._laid_out(placement, layout).expert_weights(placement), more, strict=True))
        stages = [
            of_all * (own - expert) + of_experts * expert + of_others * other
            for own, other, expert in zip(*self._parameters(placement, layout), experts, strict=True)
        ]
        return tuple(sum(stages[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks))

    def of_stages(self, placement: Placement, layout: Layout | None = None) -> StageBytes:
        """See ``Weights``."""
        return StageBytes.of(*self._parameters(placement, layout), self.parts)

    def of_layers(self) -> ModelWeights:
        """See ``Weights``."""
        return replace(self, model=replace(self.model, vocab_size=0))

    def _held(self, weight: float, replicas: int) -> float:
        return weight + self.parts.gradient + self.parts.optimizer / replicas

    def _parameters(self, placement: Placement, layout: Layout | None) -> tuple[list[float], list[float]]:
        """The parameters of layers, and of the embedding and the output layer, per stage."""
        whole, layers = (own._of_stages(placement, layout) for own in (self, self.of_layers()))
        return layers, [own - part for own, part in zip(whole, layers, strict=True)]

    def _of_stages(self, placement: Placement, layout: Layout | None) -> list[float]:
        more = prediction_weights(self.model, on_stages(self.predictions, placement))
        own = self._laid_out(placement, layout).stage_weights(placement)
        return list(map(sum, zip(own, more, strict=True)))

    def _laid_out(self, placement: Placement, layout: Layout | None) -> Model:
        return replace(self.model, layers=layout or self.division.on(placement))


@dataclass(frozen=True)
class DividedWeights:
    """The layers of a rank, and equal parts of the vocabulary on all ranks.

    Attributes:
        undivided: those of the model whose vocabulary is on the first and the last stage.
    """

    undivided: Weights

    def of_ranks(self, placement: Placement, layout: Layout | None = None) -> tuple[float, ...]:
        """See ``Weights``."""
        layers = self.of_layers().of_ranks(placement, layout)
        ends = sum(self.undivided.of_ranks(placement, layout)) - sum(layers)
        return tuple(own + ends / placement.num_ranks for own in layers)

    def of_stages(self, placement: Placement, layout: Layout | None = None) -> StageBytes:
        """See ``Weights``."""
        return self.undivided.of_stages(placement, layout)

    def of_layers(self) -> Weights:
        """See ``Weights``."""
        return self.undivided.of_layers()


@dataclass(frozen=True)
class PlannedWeights:
    """Those of one plan.

    Attributes:
        ranks: bytes per rank.
        stages: those of the job whose plan it is.
    """

    ranks: tuple[float, ...]
    stages: Weights

    def of_ranks(self, placement: Placement, layout: Layout | None = None) -> tuple[float, ...]:
        """See ``Weights``."""
        return self.ranks

    def of_stages(self, placement: Placement, layout: Layout | None = None) -> StageBytes:
        """See ``Weights``."""
        return self.stages.of_stages(placement, layout)

    def of_layers(self) -> Weights:
        """See ``Weights``."""
        return self.stages.of_layers()


def on_stages(predictions: Sequence[int], placement: Placement) -> tuple[int, ...]:
    """Return the layers of multi-token prediction per stage of a placement, which may merge or cut the job's stages."""
    found = [0] * placement.num_stages
    for stage, count in enumerate(predictions, 1):
        found[-(-stage * placement.num_stages // len(predictions)) - 1] += count
    return tuple(found)

"""Bytes of the weights, gradients and optimizer of a model, for any placement and layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.predictions import (
    prediction_expert_weights,
    prediction_weights,
    trained_prediction_weights,
)
from megatron.zero_bubble.core.costs.static import ParameterBytes, StageBytes
from megatron.zero_bubble.core.formats.layout import without_predictions
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

    def without_copies(self) -> Weights:
        """Those without the copy of the embedding that multi-token prediction has on a stage of its own."""


@dataclass(frozen=True)
class ModelWeights:
    """Those of a model.

    Attributes:
        model: the model, whose layers are divided by ``division``.
        parts: bytes per parameter.
        replicas: those that divide the optimizer state of a parameter, and of a parameter of experts.
        predictions: the letters of each layer of multi-token prediction, as in ``prediction_parts``.
        copies: whether their stage has a copy of the embedding.
    """

    model: Model
    division: Division
    parts: ParameterBytes
    replicas: tuple[int, int] = (1, 1)
    predictions: tuple[str, ...] = ()
    copies: bool = True

    @property
    def per_parameter(self) -> tuple[float, float]:
        """Bytes that a rank holds of a parameter of layers, and of a parameter of experts."""
        of_all, of_experts = (self._held(self.parts.of_layers, count) for count in self.replicas)
        return of_all, of_experts

    @property
    def held_text(self) -> str:
        """The same in words."""
        each, of_experts = self.per_parameter
        if not self.model.is_trained:
            return f"{self.parts.of_layers:.3g} bytes per parameter, trained ones {each:.3g}"
        differs = self.model.experts is not None and of_experts != each
        return f"{each:.3g} bytes per parameter" + (f", those of experts {of_experts:.3g}" if differs else "")

    def of_ranks(self, placement: Placement, layout: Layout | None = None) -> tuple[float, ...]:
        """See ``Weights``; experts have replicas of their own."""
        of_all, of_experts = (self._held(0.0, count) for count in self.replicas)
        weights = self.of_stages(placement, layout).weights
        held = [
            own + of_all * (trained - experts) + of_experts * experts
            for own, trained, experts in zip(weights, *self._trained(placement, layout), strict=True)
        ]
        return tuple(sum(held[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks))

    def of_stages(self, placement: Placement, layout: Layout | None = None) -> StageBytes:
        """See ``Weights``."""
        trained, of_experts = self._trained(placement, layout)
        found = StageBytes.of(*self._parameters(placement, layout), self.parts, trained)
        experts = self.model.experts
        if experts is None:
            return found
        own = StageBytes.of(self._of_experts(placement, layout), [0.0] * len(trained), self.parts, of_experts)
        ranks = experts.parallel * experts.tensor_parallel
        return replace(found, experts=own, per_copy=ranks / self.model.tensor_parallel)

    def of_layers(self) -> ModelWeights:
        """See ``Weights``."""
        return replace(self, model=replace(self.model, vocab_size=0))

    def without_copies(self) -> ModelWeights:
        """See ``Weights``."""
        return replace(self, copies=False)

    def _held(self, weight: float, replicas: int) -> float:
        return weight + self.parts.gradient + self.parts.optimizer / replicas

    def _parameters(self, placement: Placement, layout: Layout | None) -> tuple[list[float], list[float]]:
        """The parameters of layers, and of the embedding and the output layer, per stage."""
        whole, layers = (own._of_stages(placement, layout) for own in (self, self.of_layers()))
        return layers, [own - part for own, part in zip(whole, layers, strict=True)]

    def _trained(self, placement: Placement, layout: Layout | None) -> tuple[list[float], list[float]]:
        """The parameters per stage that have gradients and states of the optimizer, and those of experts among them."""
        if self.model.is_trained:
            return self._of_stages(placement, layout), self._of_experts(placement, layout)
        laid_out, at = self._laid_out(placement, layout)
        whole, experts = map(list, laid_out.trained_weights(placement))
        of_predictions, of_their_experts = trained_prediction_weights(self.model, self.predictions)
        whole[at] += of_predictions
        experts[at] += of_their_experts
        return whole, experts

    def _of_stages(self, placement: Placement, layout: Layout | None) -> list[float]:
        laid_out, at = self._laid_out(placement, layout)
        found = list(laid_out.stage_weights(placement))
        found[at] += prediction_weights(self.model, self.predictions, has_copy=self.copies and at > 0)
        return found

    def _of_experts(self, placement: Placement, layout: Layout | None) -> list[float]:
        """The parameters of experts, per stage."""
        laid_out, at = self._laid_out(placement, layout)
        found = list(laid_out.expert_weights(placement))
        found[at] += prediction_expert_weights(self.model, self.predictions)
        return found

    def _laid_out(self, placement: Placement, layout: Layout | None) -> tuple[Model, int]:
        """The model with the layers of a layout, and the stage of multi-token prediction."""
        parts = layout or self.division.parts(placement)
        layers, at = without_predictions(parts) if any(self.division.predictions) else (parts, len(parts) - 1)
        return replace(self.model, layers=layers), at


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

    def without_copies(self) -> DividedWeights:
        """See ``Weights``."""
        return self


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

    def without_copies(self) -> PlannedWeights:
        """See ``Weights``."""
        return replace(self, stages=self.stages.without_copies())

"""Memory that does not depend on microbatches: weights, gradients, and the state of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class ParameterBytes(NamedTuple):
    """Bytes of a parameter on one replica if it has all of it.

    Attributes:
        weight, gradient, optimizer: of the weight, its gradient, and the state of the optimizer.
        layer_weight: of a weight in the matrices of layers; None for that of all others.
    """

    weight: float
    gradient: float
    optimizer: float
    layer_weight: float | None = None

    @property
    def whole(self) -> float:
        """Bytes of a parameter outside of layers, with its gradient and states."""
        return self.weight + self.gradient + self.optimizer

    @property
    def of_layers(self) -> float:
        """Bytes of a weight in the matrices of layers."""
        return self.weight if self.layer_weight is None else self.layer_weight


@dataclass(frozen=True)
class StageBytes:
    """Static memory of every stage, on one replica if it has all of it.

    Attributes:
        weights, gradients, optimizer: bytes per stage.
    """

    weights: tuple[float, ...]
    gradients: tuple[float, ...]
    optimizer: tuple[float, ...]

    @classmethod
    def of(
        cls,
        layers: Sequence[float],
        others: Sequence[float],
        each: ParameterBytes,
        trained: Sequence[float],
    ) -> StageBytes:
        """The bytes of stages.

        Args:
            layers, others: numbers of parameters in layers, and in the embedding and the output layer, per stage.
            each: bytes per parameter.
            trained: those that have gradients and states of the optimizer.
        """
        weights = tuple(each.of_layers * own + each.weight * more for own, more in zip(layers, others, strict=True))
        return cls(weights, *(tuple(size * count for count in trained) for size in (each.gradient, each.optimizer)))

    def sharded(self, stages: Sequence[int], replicas: int) -> float:
        """Bytes of the shards of ``stages``: everything is divided by the replicas."""
        return sum(self.weights[s] + self.gradients[s] + self.optimizer[s] for s in stages) / replicas

    def least_whole(self, stages: Sequence[int], replicas: int) -> float:
        """Bytes of ``stages`` with the weights of one of them whole at a time, and all gradients, as while backwards of
        several stages take turns.
        """
        whole = max(self.weights[s] for s in stages) + sum(self.gradients[s] for s in stages)
        return self.sharded(stages, replicas) + whole

    def whole(self, stages: Sequence[int], replicas: int) -> float:
        """Bytes of ``stages`` if only the optimizer is divided, as ``--use-distributed-optimizer`` does."""
        return sum(self.weights[s] + self.gradients[s] + self.optimizer[s] / replicas for s in stages)

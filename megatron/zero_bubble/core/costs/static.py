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


class Replicated(NamedTuple):
    """Bytes per stage of parameters that have equally many replicas.

    Attributes:
        weights, gradients, optimizer: as in ``StageBytes``.
        replicas: their number.
    """

    weights: tuple[float, ...]
    gradients: tuple[float, ...]
    optimizer: tuple[float, ...]
    replicas: float

    @property
    def away(self) -> float:
        """The share that other replicas have, which a collective sends."""
        return (self.replicas - 1) / self.replicas


@dataclass(frozen=True)
class StageBytes:
    """Static memory of every stage, on one replica if it has all of it.

    Attributes:
        weights, gradients, optimizer: bytes per stage.
        experts: those of experts among them, which have replicas of their own; None without experts.
        per_copy: the factor by which a pipeline has more replicas than its experts.
    """

    weights: tuple[float, ...]
    gradients: tuple[float, ...]
    optimizer: tuple[float, ...]
    experts: StageBytes | None = None
    per_copy: float = 1.0

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
        gradients, optimizer = (tuple(size * count for count in trained) for size in (each.gradient, each.optimizer))
        return cls(weights, gradients, optimizer)

    def by_replicas(self, replicas: int) -> tuple[Replicated, ...]:
        """What has as many replicas as a pipeline, and experts, which may have fewer."""
        if self.experts is None:
            return (Replicated(self.weights, self.gradients, self.optimizer, replicas),)
        own, experts = self.experts, (self.experts.weights, self.experts.gradients, self.experts.optimizer)
        rest = (_less(self.weights, own.weights), _less(self.gradients, own.gradients))
        dense = Replicated(*rest, _less(self.optimizer, own.optimizer), replicas)
        return dense, Replicated(*experts, max(1.0, replicas / self.per_copy))

    def shared(self, replicas: int) -> tuple[Sequence[float], Sequence[float]]:
        """Bytes of weights and gradients that sharded units divide: all but experts that have one replica."""
        dense, *experts = self.by_replicas(replicas)
        if all(each.replicas == 1 for each in experts):
            return dense.weights, dense.gradients
        return self.weights, self.gradients

    def sent(self, replicas: int) -> tuple[Sequence[float], Sequence[float]]:
        """Bytes of weights and gradients that a rank sends in a gather and in a reduction of every stage."""
        weights, gradients = [0.0] * len(self.weights), [0.0] * len(self.weights)
        for part in self.by_replicas(replicas):
            weights = [own + size * part.away for own, size in zip(weights, part.weights, strict=True)]
            gradients = [own + size * part.away for own, size in zip(gradients, part.gradients, strict=True)]
        return weights, gradients

    def sharded(self, stages: Sequence[int], replicas: int) -> float:
        """Bytes of the shards of ``stages``: everything is divided by its replicas."""
        return sum(
            (part.weights[s] + part.gradients[s] + part.optimizer[s]) / part.replicas
            for part in self.by_replicas(replicas)
            for s in stages
        )

    def least_whole(self, stages: Sequence[int], replicas: int) -> float:
        """Bytes of ``stages`` with the weights of one of them whole at a time, and all gradients, as while backwards of
        several stages take turns.
        """
        weights, gradients = self.shared(replicas)
        whole = max(weights[s] for s in stages) + sum(gradients[s] for s in stages)
        return self.sharded(stages, replicas) + whole

    def whole(self, stages: Sequence[int], replicas: int) -> float:
        """Bytes of ``stages`` if only the optimizer is divided, as ``--use-distributed-optimizer`` does."""
        optimizer = sum(part.optimizer[s] / part.replicas for part in self.by_replicas(replicas) for s in stages)
        return sum(self.weights[s] + self.gradients[s] for s in stages) + optimizer


def _less(all_of_it: Sequence[float], part: Sequence[float]) -> tuple[float, ...]:
    return tuple(size - own for size, own in zip(all_of_it, part, strict=True))

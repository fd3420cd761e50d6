"""Memory that does not depend on microbatches: weights, gradients, and the state of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    def of(cls, parameters: Sequence[float], weight: float, gradient: float, optimizer: float) -> StageBytes:
        """The bytes of stages with these numbers of parameters, given the bytes per parameter."""
        return cls(*(tuple(each * count for count in parameters) for each in (weight, gradient, optimizer)))

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

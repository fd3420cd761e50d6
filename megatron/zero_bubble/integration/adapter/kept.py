"""What the slices of a sequence leave for each other, by microbatch and layer."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

import torch


class OfLayer(Protocol):
    """What is kept of one microbatch in one layer."""

    def tensors(self) -> Iterator[torch.Tensor]: ...


Layer = TypeVar("Layer", bound=Hashable)
Content = TypeVar("Content", bound=OfLayer)


class KeptOfSlices(Generic[Layer, Content]):
    """That of all microbatches on this rank whose backward is not complete, by stage and microbatch.

    Attributes:
        in_forward: whether an F pass runs. A backward within it, of gradients that a loss asks for, leaves what other
            slices have left alone.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], dict[Layer, Content]] = {}
        self.in_forward = False

    def __len__(self) -> int:
        return len(self._kept)

    def drop_layer(self, of: tuple[int, int], layer: Layer) -> None:
        """Free that of one layer."""
        del self._kept[of][layer]
        if not self._kept[of]:
            del self._kept[of]

    def drop(self, of: tuple[int, int]) -> None:
        """Free that of all layers, if there is any."""
        self._kept.pop(of, None)

    def clear(self) -> None:
        """Free everything, for example after an iteration that failed."""
        self._kept.clear()

    def tensors(self, stage: int | None = None, microbatch: int | None = None) -> Iterator[torch.Tensor]:
        """All tensors, or those of a stage or of a microbatch."""
        for (of_stage, of_microbatch), layers in self._kept.items():
            if stage in (None, of_stage) and microbatch in (None, of_microbatch):
                for own in layers.values():
                    yield from own.tensors()

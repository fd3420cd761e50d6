"""Weight gradients that a CUDA graph computes, of TransformerEngine or of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from megatron.zero_bubble.engine.wgrad.gradients import Product


class ReplayedGradients:
    """The weight gradients of a layer, or of a stage, in one microbatch, as an entry of the store. The operands are in
    the memory of graphs, which is counted by slots.

    Args:
        weights: at least one; the graph accumulates their gradients.
        replay: replays the graph of W, and tells data parallelism.
    """

    gathers = False

    def __init__(self, weights: Sequence[torch.nn.Parameter], replay: Callable[[], None]) -> None:
        self.weight = weights[0]
        self.num_elements = sum(weight.numel() for weight in weights)
        self._replay = replay

    def prefetch(self) -> None:
        """Do nothing: communication is in the graph."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """None that W frees."""
        return ()

    operands = tensors

    def copy(self, written: torch.Tensor) -> None:
        """Do nothing: nothing outside of graphs has an operand."""

    def run(self) -> Iterable[Product]:
        """See ``Deferred``."""
        self._replay()
        return ()

"""The weight gradients of layers that run as CUDA graphs of TransformerEngine, whose W is a graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from megatron.zero_bubble.engine.wgrad.delayed import DelayedModule
from megatron.zero_bubble.engine.wgrad.gradients import Product


class GraphedGradients:
    """The weight gradients of one replay of a layer's B: a replay puts no operands into queues, the graphs have them.

    Args:
        modules: those of the layer whose weight gradients the graph computes.
        replay: replays the graph of W, and calls the hooks of data parallelism.
    """

    gathers = False

    def __init__(self, modules: Sequence[DelayedModule], replay: Callable[[], None]) -> None:
        self._modules = modules
        self._replay = replay

    @property
    def weight(self) -> torch.nn.Parameter:
        """The first weight of the layer."""
        return self._modules[0].weights[0]

    @property
    def num_elements(self) -> int:
        """Number of elements of all its weights."""
        return sum(weight.numel() for module in self._modules for weight in module.weights)

    def prefetch(self) -> None:
        """Do nothing: what the graph needs of other ranks, it has."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """None: the memory of graphs is counted by slots."""
        return ()

    operands = tensors

    def copy(self, written: torch.Tensor) -> None:
        """Do nothing: what waits for W is in the memory of the graphs."""

    def run(self) -> Iterable[Product]:
        """Replay W; the graph itself has accumulated the gradients."""
        for module in self._modules:
            module.expect_replay()
        self._replay()
        return ()

"""States that a layer hands on from one slice of a sequence to the next, such as that of a scan over the tokens.

The F passes of a microbatch run from the first slice to the last: each begins with the state that the one before has
left. The B passes run from the last slice to the first: each leaves the gradient of the state that its slice began
with, and the B of the slice before takes it as the gradient of what that slice has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron.zero_bubble.integration.adapter.kept import KeptOfSlices


class Place(NamedTuple):
    """Where a state is: in a layer that runs a slice.

    Attributes:
        of: stage and microbatch.
        layer: any name of the layer, and of the state if it has several.
        slices: how many the sequence has.
    """

    of: tuple[int, int]
    layer: tuple[int, str]
    slice: int
    slices: int

    @property
    def is_last(self) -> bool:
        """Whether no slice follows."""
        return self.slice == self.slices - 1

    @property
    def before(self) -> Place:
        """The same in the slice before."""
        return self._replace(slice=self.slice - 1)


class _OfLayer:
    """The states of one microbatch in one layer, by the slice that has left them.

    Attributes:
        left: states, from the F of the slice until its B.
        gradients: theirs, from the B of the next slice until that of the slice.
    """

    def __init__(self) -> None:
        self.left: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, torch.Tensor | None] = {}

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.left.values()
        yield from (gradient for gradient in self.gradients.values() if gradient is not None)


class States(KeptOfSlices[tuple[int, str], _OfLayer]):
    """The states of all microbatches on this rank whose backward is not complete."""

    def begun(self, at: Place, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The state that the slice before ``at`` has left; the first slice has none before it.

        Args:
            inputs: what else the layer computes with the state, which decides whether it needs a gradient.
        """
        state: torch.Tensor = _Begin.apply(self, at.before, *inputs)
        return state

    def leave(self, at: Place, output: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Keep the state after a slice; may be repeated, because recomputation runs forwards again.

        Args:
            output: what the layer computes besides the state.

        Returns:
            the output, through which the gradient reaches the state, too.
        """
        passed: torch.Tensor = _Leave.apply(self, at, output, state)
        return passed

    def of(self, at: Place) -> _OfLayer:
        return self._kept.setdefault(at.of, {}).setdefault(at.layer, _OfLayer())

    def forget(self, at: Place) -> None:
        """Free what the B of a slice was the last to need."""
        own = self.of(at)
        own.left.pop(at.slice, None)
        own.gradients.pop(at.slice, None)
        if at.slice == 0:
            self.drop_layer(at.of, at.layer)


class _Begin(torch.autograd.Function):
    """Returns the state of a slice, and keeps its gradient for the B of that slice."""

    @staticmethod
    def forward(ctx: Any, states: States, at: Place, *_inputs: torch.Tensor) -> torch.Tensor:
        ctx.states, ctx.at = states, at
        return states.of(at).left[at.slice].detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if not ctx.states.in_forward:
            ctx.states.of(ctx.at).gradients[ctx.at.slice] = gradient
        return (None,) * len(ctx.needs_input_grad)


class _Leave(torch.autograd.Function):
    """Keeps the state after a slice, and gives it the gradient that the B of the next slice has kept."""

    @staticmethod
    def forward(ctx: Any, states: States, at: Place, output: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        ctx.states, ctx.at = states, at
        states.of(at).left[at.slice] = state.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.states.in_forward:
            return None, None, gradient, None
        of_state = ctx.states.of(ctx.at).gradients.get(ctx.at.slice)
        ctx.states.forget(ctx.at)
        return None, None, gradient, of_state

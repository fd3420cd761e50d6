"""The backward of stages that hand on several tensors.

Megatron's own backward step reaches the first output only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch


def leaves(value: Any, trains: bool) -> Any:
    """What a stage has received, as leaves of autograd: a tensor, or a list of several."""
    if isinstance(value, tuple):
        return [leaves(each, trains) for each in value]
    return value.detach().requires_grad_(trains and value.is_floating_point())


def value_of(output: Any) -> Any:
    """What a stage has computed: a tensor, or a tuple of several. Megatron's step puts it into a list if it got one."""
    found = tuple(_tensors(output))
    return found if len(found) > 1 else found[0]


def detached(value: Any) -> Any:
    """A value without its graph."""
    return tuple(each.detach() for each in value) if isinstance(value, tuple) else value.detach()


def differentiable(x: Any) -> Any:
    """The tensors of a list that have gradients."""
    return list(filter(torch.is_floating_point, x)) if isinstance(x, list) else x


def backward(x: Any, y: tuple[torch.Tensor, ...], gradients: Sequence[torch.Tensor]) -> Any:
    """Backpropagate through all outputs of a stage; returns the gradients of what it has received.

    Args:
        x: the leaves that have gradients; None on the first stage.
        gradients: those of the outputs that are not integers.
    """
    pairs = zip(filter(torch.is_floating_point, y), gradients, strict=True)
    trained = [(each, gradient) for each, gradient in pairs if each.requires_grad]
    if trained:  # a first stage may be frozen
        outputs, received = zip(*trained, strict=True)
        torch.autograd.backward(outputs, received)
    return None if x is None else [each.grad for each in x] if isinstance(x, list) else x.grad


def gradients_of(x: list[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """The gradients to hand on, of all tensors but integers: zeros for those that the stage does not use."""
    pairs = zip(differentiable(x), gradients, strict=True)
    return tuple(torch.zeros_like(each) if gradient is None else gradient for each, gradient in pairs)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, (list, tuple)):
        yield from chain.from_iterable(map(_tensors, output))
    else:
        yield output

"""Gradients that stand in for those that W has already added to ``main_grad``."""

from __future__ import annotations

from functools import cache

import torch


def stand_in_grad(parameter: torch.Tensor) -> torch.Tensor:
    """A zero gradient for a hook of data parallelism, which needs one but does not add it; not to be written to.

    All parameters of a device and dtype share one zero, because a kernel that fills it for every weight in every W
    would cost more than it is worth. It is expanded to the shape of the parameter, so that torch refuses to add to it
    in place. Only a parameter of one element gets a zero of its own, because an expanded one could be written to. torch
    does not refuse ``fill_`` and item assignment: a hook that does one of these would change the zero of all.
    """
    if parameter.numel() == 1:
        return torch.zeros_like(parameter)
    return _zero(parameter.device, parameter.dtype).expand(parameter.shape)


@cache
def _zero(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), device=device, dtype=dtype)

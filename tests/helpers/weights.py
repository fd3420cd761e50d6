"""Initial weights that depend only on names, so that a layer has the same ones on every rank and placement."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch


def draw_by_name(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Draw the matrices of a model; vectors keep their values.

    Args:
        parameters: with their names in the whole model.
    """
    for name, parameter in parameters:
        if parameter.dim() > 1:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)

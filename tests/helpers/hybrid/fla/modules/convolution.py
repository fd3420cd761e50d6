"""The causal convolution of megatron-core since 0.18."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **_more: Any
) -> tuple[torch.Tensor, None]:
    """Convolve ``[b, l, channels]`` by ``[channels, width]``, before ``silu``."""
    channels, width = weight.shape
    padded = functional.pad(x.transpose(1, 2), (width - 1, 0))
    convolved = functional.conv1d(padded, weight.unsqueeze(1), bias, groups=channels)
    return functional.silu(convolved).transpose(1, 2), None


causal_conv1d_update = None

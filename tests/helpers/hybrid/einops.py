"""The part of ``einops`` with which megatron-core trains Mamba layers, for environments without it."""

from __future__ import annotations

import torch


def rearrange(tensor: torch.Tensor, pattern: str) -> torch.Tensor:
    """Permute axes, and drop those of size 1, as in ``"d 1 w -> d w"``; the result is a view."""
    before, after = (side.split() for side in pattern.split("->"))
    names = [name for name in before if name != "1"]
    kept = [size for size, name in zip(tensor.shape, before, strict=True) if name != "1"]
    return tensor.reshape(kept).permute([names.index(name) for name in after])


repeat = None

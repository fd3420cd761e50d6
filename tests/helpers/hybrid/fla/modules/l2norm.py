"""The norm of queries and keys."""

from __future__ import annotations

import torch


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Divide the last dimension by its length."""
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)

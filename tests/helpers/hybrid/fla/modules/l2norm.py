"""The norm of queries and keys."""

from __future__ import annotations

import torch


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps)).to(x.dtype)

"""The scan of a Mamba layer (arXiv 2405.21060), computed like attention, with one matrix of l x l weights per head."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    rates: torch.Tensor,
    *,
    headdim: int,
    ngroups: int,
    **more: Any,
) -> torch.Tensor:
    """Convolve and scan the output ``zxbcdt`` of a layer's first matrix; returns ``[b, l, heads * headdim]``.

    Args:
        zxbcdt: ``[b, l, z and x of all heads, B and C of all groups, dt of all heads]``.
        conv1d_weight, conv1d_bias: ``[channels, width]`` and ``[channels]``, of a causal convolution over x, B and C.
        dt_bias, rates: one number per head; ``D``, in ``more``, as well.
    """
    heads = dt_bias.numel()
    channels, width = conv1d_weight.shape
    inner = heads * headdim
    z, convolved, dt = zxbcdt.split((inner, channels, heads), -1)
    padded = functional.pad(convolved.transpose(1, 2), (width - 1, 0))
    convolved = functional.conv1d(padded, conv1d_weight.unsqueeze(1), conv1d_bias, groups=channels)
    x, b, c = functional.silu(convolved).transpose(1, 2).float().split((inner, *((channels - inner) // 2,) * 2), -1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (of.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for of in (b, c))
    step = functional.softplus(dt.float() + dt_bias)
    y = _scan(x * step.unsqueeze(-1), step * rates, b, c) + x * more["D"].unsqueeze(-1)
    return (y.flatten(-2) * functional.silu(z.float())).to(zxbcdt.dtype)


def _scan(x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Sum ``exp(decay after j up to i) (c_i . b_j) x_j`` over all j <= i; ``[b, l, h, ...]`` all."""
    length, total = x.shape[1], decay.cumsum(1).transpose(1, 2)
    later = torch.ones(length, length, dtype=torch.bool).tril().logical_not()
    weights = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    scores = torch.einsum("bihn,bjhn->bhij", c, b) * weights
    return torch.einsum("bhij,bjhp->bihp", scores, x)


def mamba_chunk_scan_combined(*_arguments: Any, **_more: Any) -> None:
    raise NotImplementedError("only training with --use-mamba-mem-eff-path, the default, has a stand-in")

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
    x, b, c = functional.silu(convolved).transpose(1, 2).split((inner, *((channels - inner) // 2,) * 2), -1)
    x, z = (of.unflatten(-1, (heads, headdim)) for of in (x, z))
    b, c = (of.unflatten(-1, (ngroups, -1)) for of in (b, c))
    y = mamba_chunk_scan_combined(x, dt, rates, b, c, 0, D=more["D"], z=z, dt_bias=dt_bias, dt_softplus=True)
    assert isinstance(y, torch.Tensor)
    return y.flatten(-2)


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    rates: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    _chunk_size: int,
    *,
    z: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    **more: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scan ``x``, ``[b, l, h, p]``, with ``b`` and ``c``, ``[b, l, g, n]``, from and to states ``[b, h, p, n]``.

    In float64, because the differences of long sums, unlike those within a chunk, would lose what float32 has.
    """
    heads, skip = x.shape[2], more["D"].double().unsqueeze(-1)
    b, c = (of.double().repeat_interleave(heads // of.shape[2], 2) for of in (b, c))
    step = functional.softplus(dt.double() + dt_bias)
    scaled, decay = x.double() * step.unsqueeze(-1), step * rates
    y = _scan(scaled, decay, b, c) + x.double() * skip
    total = decay.cumsum(1).exp()
    if initial_states is not None:
        y = y + torch.einsum("bihn,bhpn->bihp", c, initial_states.double()) * total.unsqueeze(-1)
    y = (y * functional.silu(z.double())).to(x.dtype)
    if not return_final_states:
        return y
    left = (decay.sum(1, keepdim=True) - decay.cumsum(1)).exp()
    final = torch.einsum("bjhp,bjhn,bjh->bhpn", scaled, b, left)
    if initial_states is not None:
        final = final + initial_states * total[:, -1, :, None, None]
    return y, final.to(torch.promote_types(x.dtype, torch.float32))


def _scan(x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Sum ``exp(decay after j up to i) (c_i . b_j) x_j`` over all j <= i; ``[b, l, h, ...]`` all."""
    length, total = x.shape[1], decay.cumsum(1).transpose(1, 2)
    later = torch.ones(length, length, dtype=torch.bool).tril().logical_not()
    weights = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    scores = torch.einsum("bihn,bjhn->bhij", c, b) * weights
    return torch.einsum("bhij,bjhp->bihp", scores, x)

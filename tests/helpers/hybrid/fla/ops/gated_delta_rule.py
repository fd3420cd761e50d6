"""The recurrence of a gated delta net (arXiv 2412.06464), token by token."""

from __future__ import annotations

from typing import Any

import torch


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_more: Any
) -> tuple[torch.Tensor, None]:
    """Decay a state by ``exp(g)``, replace what it has of a key by the key's value, and read it with the query.

    Args:
        q, k, v: ``[b, l, heads, width]``.
        g, beta: ``[b, l, heads]``, the logarithm of the decay and how much of a value is written.
    """
    queries, keys, values, decay, written = (each.float().unbind(1) for each in (q, k, v, g, beta))
    state = torch.zeros(*keys[0].shape, values[0].shape[-1])
    outputs = []
    for query, key, value, rate, share in zip(queries, keys, values, decay, written, strict=True):
        state = state * rate.exp()[..., None, None]
        missing = (value - torch.einsum("bhk,bhkv->bhv", key, state)) * share.unsqueeze(-1)
        state = state + torch.einsum("bhk,bhv->bhkv", key, missing)
        outputs.append(torch.einsum("bhk,bhkv->bhv", query, state))
    return (torch.stack(outputs, 1) / q.shape[-1] ** 0.5).to(v.dtype), None

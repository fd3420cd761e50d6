"""The rule of a gated delta net (arXiv 2412.06464), computed token by token."""

from __future__ import annotations

from typing import Any

import torch


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    **_more: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keep a map from keys to values, which each token reads, corrects by ``beta`` at its key, and queries.

    Args:
        q, k, v: ``[b, l, heads, features]``.
        g, beta: ``[b, l, heads]``; the map decays by ``exp(g)`` before each token.
    """
    state = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    state, outputs = state.double(), []
    for query, key, value, decay, strength in zip(*(of.double().unbind(1) for of in (q, k, v, g, beta)), strict=True):
        state = state * decay.exp()[..., None, None]
        off = (value - torch.einsum("bhk,bhkv->bhv", key, state)) * strength.unsqueeze(-1)
        state = state + torch.einsum("bhk,bhv->bhkv", key, off)
        outputs.append(torch.einsum("bhk,bhkv->bhv", query, state) * q.shape[-1] ** -0.5)
    final = state.to(torch.promote_types(v.dtype, torch.float32)) if output_final_state else None
    return torch.stack(outputs, 1).to(v.dtype), final


fused_recurrent_gated_delta_rule = None

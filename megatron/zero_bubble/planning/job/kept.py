"""What a job keeps of its layers for their backwards, from its flags for precision and recomputation."""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.core.costs.attention import Latent
from megatron.zero_bubble.core.costs.kept import CORE_ATTENTION, Kept
from megatron.zero_bubble.core.costs.precision import BF16, PRECISIONS, Precision
from megatron.zero_bubble.core.costs.sparse import Indexer

_LATENT = {
    "query_rank": "q_lora_rank",
    "rank": "kv_lora_rank",
    "head_size": "qk_head_dim",
    "position_size": "qk_pos_emb_head_dim",
    "value_size": "v_head_dim",
}
"""Fields of ``Latent``, and Megatron's options."""


def linear_precision(args: Any) -> Precision:
    """Return the precision in which a job's linear layers compute."""
    if getattr(args, "fp4", None):
        return PRECISIONS["nvfp4"]
    if not getattr(args, "fp8", None):
        return BF16
    recipe = getattr(args, "fp8_recipe", None)
    name = str(getattr(recipe, "value", recipe))  # an enum in megatron-core
    return PRECISIONS.get(name, PRECISIONS["tensorwise"])


def kept_of(args: Any) -> Kept:
    """Return what decides which tensors of a job are kept.

    Args:
        args: its flags, in our loop, in Megatron-LM or in planning.
    """
    modules = getattr(args, "recompute_modules", None)
    return Kept(
        (CORE_ATTENTION,) if modules is None else tuple(modules),
        linear_precision(args).operand_bytes,
        getattr(args, "hidden_dropout", 0.1) > 0,
    )


def indexer_of(args: Any) -> Indexer | None:
    """Return the shapes of a job's indexers; None if it has none."""
    heads, size, picked = (getattr(args, f"dsa_indexer_{name}", None) for name in ("n_heads", "head_dim", "topk"))
    if not (heads and size and picked):
        return None
    is_trained = bool(getattr(args, "dsa_indexer_loss_coeff", None))
    return Indexer(heads, size, picked, is_trained, bool(getattr(args, "dsa_indexer_use_sparse_loss", False)))


def latent_of(args: Any) -> Latent | None:
    """Return the shapes of a job's latent attention; None if it has none."""
    if not getattr(args, "multi_latent_attention", False):
        return None
    return Latent(**{name: getattr(args, option) for name, option in _LATENT.items() if hasattr(args, option)})

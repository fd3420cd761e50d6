"""What a job keeps of its layers for their backwards, from its flags for precision and recomputation."""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.core.costs.attention import Latent
from megatron.zero_bubble.core.costs.kept import CORE_ATTENTION, OPERAND_BYTES, Kept
from megatron.zero_bubble.core.costs.precision import BF16, PRECISIONS, Precision

_LATENT = {
    "query_rank": "q_lora_rank",
    "rank": "kv_lora_rank",
    "head_size": "qk_head_dim",
    "position_size": "qk_pos_emb_head_dim",
    "value_size": "v_head_dim",
}
"""Fields of ``Latent``, and Megatron's options."""


def precision_of(args: Any) -> str:
    """Return the precision of the matrix products in a job's layers, by a name in ``OPERAND_BYTES``."""
    if getattr(args, "fp4", None):
        return "nvfp4"
    recipe = getattr(args, "fp8_recipe", None)
    return ("mxfp8" if getattr(recipe, "value", recipe) == "mxfp8" else "fp8") if getattr(args, "fp8", None) else "bf16"


def linear_precision(args: Any) -> Precision:
    """Return the precision in which a job's linear layers compute."""
    recipe = getattr(args, "fp8_recipe", None) if getattr(args, "fp8", None) else None
    recipe = "nvfp4" if getattr(args, "fp4", None) else getattr(recipe, "value", recipe)  # an enum in megatron-core
    return BF16 if recipe is None else PRECISIONS.get(recipe, PRECISIONS["tensorwise"])


def kept_of(args: Any) -> Kept:
    """Return what decides which tensors of a job are kept.

    Args:
        args: its flags, in our loop, in Megatron-LM or in planning.
    """
    modules = getattr(args, "recompute_modules", None)
    return Kept(
        (CORE_ATTENTION,) if modules is None else tuple(modules),
        OPERAND_BYTES[precision_of(args)],
        getattr(args, "hidden_dropout", 0.1) > 0,
    )


def latent_of(args: Any) -> Latent | None:
    """Return the shapes of a job's latent attention; None if it has none."""
    if not getattr(args, "multi_latent_attention", False):
        return None
    return Latent(**{name: getattr(args, option) for name, option in _LATENT.items() if hasattr(args, option)})

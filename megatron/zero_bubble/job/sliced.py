"""Megatron options that slices of sequences do not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.zero_bubble.errors import UserError


class _Rule(NamedTuple):
    """``broken(values)`` returns how the option was given if it breaks the rule, else None."""

    broken: Callable[[Any], str | None]
    why: str
    remedy: str


def _of(name: str, *allowed: object) -> Callable[[Any], str | None]:
    def broken(values: Any) -> str | None:
        value = getattr(values, name, None)
        return None if value in (None, *allowed) else f"{name}={value!r}"

    return broken


def _sequence_loss(values: Any) -> str | None:
    kinds = getattr(values, "moe_router_load_balancing_type", None)
    named = [kinds] if isinstance(kinds, str) else kinds or []
    return f"moe_router_load_balancing_type={kinds!r}" if "seq_aux_loss" in named else None


def _fused_softmax(values: Any) -> str | None:
    fused = getattr(values, "masked_softmax_fusion", False) and getattr(values, "transformer_impl", "") == "local"
    short = getattr(values, "bf16", False) or getattr(values, "fp16", False)
    return "masked_softmax_fusion=True" if fused and short else None


def _fused_latent(values: Any) -> str | None:
    latent = getattr(values, "multi_latent_attention", False) and getattr(values, "apply_rope_fusion", False)
    return "multi_latent_attention with apply_rope_fusion" if latent else None


_RULES = (
    _Rule(
        _of("context_parallel_size", 1),
        "context parallelism divides the same sequence among ranks",
        "give --context-parallel-size 1",
    ),
    _Rule(
        _of("mtp_num_layers", 0), "multi-token prediction needs the tokens of the next slice", "drop --mtp-num-layers"
    ),
    _Rule(
        _sequence_loss,
        "this auxiliary loss is computed over whole sequences",
        "give --moe-router-load-balancing-type aux_loss",
    ),
    _Rule(_of("sft", False), "samples of fine-tuning are packed sequences", "drop --sft"),
    _Rule(
        _fused_softmax,
        "the fused softmax of local attention assumes as many keys as queries",
        "give --no-masked-softmax-fusion",
    ),
    _Rule(
        _fused_latent,
        "the fused rotary embedding starts at the first position of the sequence",
        "drop --apply-rope-fusion",
    ),
)


def check_sliced(values: Any, name: str) -> None:
    """Reject Megatron options that the slices of schedule ``name`` do not support.

    Args:
        values: a ``TransformerConfig``, or the flags of a job; missing options count as disabled.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    for rule in _RULES:
        if (given := rule.broken(values)) is not None:
            raise UserError(
                f"slices of sequences do not support {given}, because {rule.why}; {rule.remedy}, or choose a schedule "
                f"without slices instead of {name}"
            )

"""Options of a model of which only some values work with a choice.

The first rows are what megatron-core requires for its own overlap of experts. ``exclusions.py`` has the options with
one such value, and what excludes what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.zero_bubble.core.errors import Remedy
from megatron.zero_bubble.planning.exclusions import BALANCE, EARLY, HYBRID, PAIRS, SCHEDULE, SLICES, VOCABULARY
from megatron.zero_bubble.planning.rule import Fits, OptionRule

_SPARSE = "its sparse attention chooses among the keys of whole sequences"
_CUT_LETTERS = Fits("without D", lambda pattern, _: "D" not in pattern)
_CUT_VARIANTS = Fits("gated_delta_net or gdn", lambda name, _: name in ("gated_delta_net", "gdn"))
_NO_PREDICTIONS = Fits(
    "None with hyper-connections", lambda _, options: not getattr(options, "enable_hyper_connections", False)
)


def _modules_left(modules: Sequence[str]) -> tuple[str, ...]:
    """The flag for the recomputed modules but experts."""
    left = [name for name in modules if name != "moe"]
    return ("--recompute-modules", *left) if left else ()


def _fuses_loss(options: Any) -> bool:
    return getattr(options, "cross_entropy_loss_fusion", False)


def _has_latent_rotary_embeddings(options: Any) -> bool:
    """Whether a model, or the model of a job, has latent attention; Megatron-LM fuses nothing without ``rope``."""
    is_rotary = getattr(options, "position_embedding_type", "rope") == "rope"
    is_rotary = is_rotary or getattr(options, "use_rotary_position_embeddings", False)
    return is_rotary and getattr(options, "multi_latent_attention", False)


RANGES = (
    OptionRule(SCHEDULE, "mtp_num_layers", _NO_PREDICTIONS, "Megatron's own training ends in a backward of theirs"),
    OptionRule(
        VOCABULARY,
        "cross_entropy_fusion_impl",
        Fits("native or te, if it is used", lambda value, options: value != "linear" or not _fuses_loss(options)),
        "this one computes whole logits within the loss",
        "give --cross-entropy-fusion-impl native",
    ),
    OptionRule(
        PAIRS,
        "expert_model_parallel_size",
        Fits("2 or more", lambda size, _: size > 1),
        "without expert parallelism there is no all-to-all to hide",
        "raise it, or leave pairs out",
    ),
    OptionRule(
        PAIRS,
        "moe_token_dispatcher_type",
        Fits("alltoall or flex", lambda kind, _: kind in ("alltoall", "flex")),
        "another dispatcher has no all-to-all",
        "give --moe-token-dispatcher-type alltoall",
        flags=lambda _: Remedy(("--moe-token-dispatcher-type", "alltoall")),
    ),
    OptionRule(
        PAIRS,
        "recompute_granularity",
        Fits("selective, or left out", lambda kind, _: kind == "selective"),
        "megatron-core's plans of layers do not recompute whole layers",
        "give --recompute-granularity selective",
        flags=lambda _: Remedy(
            ("--recompute-granularity", "selective"), ("--recompute-method", "--recompute-num-layers"), True
        ),
    ),
    *(
        OptionRule(EARLY, name, Fits("None", lambda kind, _: not kind), "TransformerEngine's own checkpoint runs in B")
        for name in ("fp8", "fp4")
    ),
    OptionRule(
        PAIRS,
        "moe_shared_expert_overlap",
        Fits("False", lambda overlaps, _: not overlaps),
        "shared experts would run during the same all-to-all",
        flags=lambda _: Remedy(drops=("--moe-shared-expert-overlap",)),
    ),
    OptionRule(
        PAIRS,
        "mtp_num_layers",
        Fits("1 or less", lambda number, _: number <= 1),
        "megatron-core's plans of layers have one prediction at most",
        "lower --mtp-num-layers",
    ),
    OptionRule(
        VOCABULARY,
        "context_parallel_size",
        Fits("1 with mtp_num_layers", lambda size, options: size == 1 or not getattr(options, "mtp_num_layers", None)),
        "the tokens that follow a rank's part of a sequence are looked up in other pipelines",
    ),
    OptionRule(
        VOCABULARY,
        "mtp_num_layers",
        Fits(
            "0 in a hybrid model",
            lambda number, options: not number or all(getattr(options, name, no) in (None, no) for name, no in HYBRID),
        ),
        "its predictions have not been compared with stock",
    ),
    OptionRule(
        PAIRS,
        "recompute_modules",
        Fits("without moe", lambda modules, _: "moe" not in modules),
        "megatron-core's plans of layers run the parts of an expert layer one by one",
        "leave moe out of --recompute-modules",
        flags=lambda modules: Remedy(_modules_left(modules), ("--recompute-modules",), True),
    ),
    OptionRule(
        PAIRS,
        "bf16",
        Fits("True, or fp16", lambda is_on, options: is_on or getattr(options, "fp16", True)),
        "megatron-core's plans of layers need 16-bit parameters",
        "give --bf16",
    ),
    OptionRule(
        BALANCE,
        "moe_token_dispatcher_type",
        Fits("alltoall or flex", lambda kind, job: kind != "allgather" or job.expert_model_parallel_size == 1),
        "allgather needs equally many tokens on all replicas that share experts",
        "give --moe-token-dispatcher-type alltoall",
    ),
    OptionRule(
        SLICES,
        "apply_rope_fusion",
        Fits("False", lambda fuses, options: not (fuses and _has_latent_rotary_embeddings(options))),
        "the fused rotary embeddings of latent attention begin at the first token",
        "give --no-rope-fusion",
        flags=lambda _: Remedy(("--no-rope-fusion",)),
    ),
    OptionRule(SLICES, "experimental_attention_variant", _CUT_VARIANTS, "other variants hand on no state"),
    *(OptionRule(SLICES, name, _CUT_LETTERS, _SPARSE, "train without slices") for name, _ in HYBRID[:2]),
)
"""None is always supported."""

"""What excludes the CUDA graphs of a job: rows like those of ``exclusions.OPTIONS``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from megatron.zero_bubble.core.errors import as_flag
from megatron.zero_bubble.planning.exclusions import (
    LENGTHS,
    OFFLOAD,
    PAIRS,
    PLANS,
    SCHEDULE,
    SHARDS,
    SLICES,
    STREAMS,
)
from megatron.zero_bubble.planning.rule import Fits, OptionRule

GRAPH_OPTIONS = {"enable_cuda_graph": False, "external_cuda_graph": False, "cuda_graph_impl": "none"}
"""The options that ask for graphs, with what asks for none; before 0.15, graphs have separate flags."""
_ORDER = "Megatron captures CUDA graphs in the order of its own 1F1B"
_MESSAGES = "a graph of a whole iteration has the messages between ranks, and their order in a replay is not defined"
_DROP = "set --cuda-graph-impl none, or, with --perform-rl-step, drop --rl-training-cuda-graphs"
_CANNOT_MOVE = "what a graph keeps for its backward cannot leave the GPU"
_EXCLUDING = (
    (SLICES, "the keys and values of earlier slices are outside of CUDA graphs"),
    (SHARDS, "CUDA graphs read weights where they were when captured"),
    (PAIRS, _ORDER),
    (OFFLOAD, _CANNOT_MOVE),
    (LENGTHS, "CUDA graphs are captured for one length"),
)
_UNMEASURED = "what CUDA graphs keep is not measured, and these are captured before the first iteration"
_SIZES = "experts get other numbers of tokens in every microbatch, and a CUDA graph of a stage repeats one size"
_SCALES = "TransformerEngine computes scales in Python, which a CUDA graph of a stage does not run again"
_PYTHON = "Python keeps the maximum of the attention logits, and a replay runs no Python"
_MASKS = "a graph that computes a forward again would draw another mask"
_WHOLE = "megatron-core recomputes whole layers in graphs of whole iterations only"
_NO_BLOCK = "the layers of a hybrid model are no TransformerBlock"
_OF_STREAMS = "graphs have not been compared with stock where there are several residual streams"
_EXCLUDING_LOCAL = {
    "num_experts": _SIZES,
    "num_moe_experts": _SIZES,
    "fp8": _SCALES,
    "fp4": _SCALES,
    "hybrid_layer_pattern": _NO_BLOCK,
    "hybrid_override_pattern": _NO_BLOCK,
    "is_hybrid_model": _NO_BLOCK,
}
_OF_LOCAL, _LOCAL = ("enable_cuda_graph", "cuda_graph_impl"), (True, "local")


def _without(
    option: str, why: str, names: Iterable[str] = GRAPH_OPTIONS, asking: Sequence[Any] = ()
) -> list[OptionRule]:
    """Rows for an option of Megatron that excludes graphs of layers: those of the values ``asking``, or all."""
    works = Fits(
        f"off with {as_flag(option)}",
        lambda given, options: (
            (given not in asking if asking else given in (False, "none")) or not getattr(options, option, None)
        ),
    )
    return [OptionRule(SCHEDULE, name, works, why, _DROP) for name in names]


def _asks(options: Any) -> bool:
    return any(getattr(options, name, None) not in (None, off) for name, off in GRAPH_OPTIONS.items())


def _is_of_iteration(scope: Any) -> bool:
    """Whether a scope, a name or a list of names or of members of an enumeration, is the whole iteration."""
    return "full_iteration" in re.findall(r"\w+", str(scope))


def _draws_once(given: Any, options: Any) -> bool:
    """Whether a graph of a stage draws no random numbers that it would have to draw again."""
    drops = any(getattr(options, name, 0.0) for name in ("attention_dropout", "hidden_dropout"))
    recomputes = getattr(options, "recompute_granularity", None) or getattr(options, "recompute_activations", False)
    return given not in _LOCAL or not (drops and recomputes)


def _warms_up(given: Any, options: Any) -> bool:
    """Whether the first iteration of a job runs without graphs of TransformerEngine."""
    return given > 0 or getattr(options, "cuda_graph_impl", None) != "transformer_engine"


def _keeps_layers(given: Any, options: Any) -> bool:
    """Whether no graph of layers would have to recompute them as a whole."""
    return given in (False, "none") or getattr(options, "recompute_granularity", None) != "full"


GRAPHS = (
    OptionRule(
        SCHEDULE,
        "cuda_graph_impl",
        Fits("none, local or transformer_engine", lambda given, _: not _is_of_iteration(given)),
        _MESSAGES,
        _DROP,
    ),
    OptionRule(
        SCHEDULE,
        "cuda_graph_scope",
        Fits("other than full_iteration", lambda given, options: not (_is_of_iteration(given) and _asks(options))),
        _MESSAGES,
        _DROP,
    ),
    *(row for option, why in _EXCLUDING_LOCAL.items() for row in _without(option, why, _OF_LOCAL, _LOCAL)),
    *(row for option in STREAMS for row in _without(option, _OF_STREAMS)),
    *_without("fine_grained_activation_offloading", _CANNOT_MOVE),
    *_without("qk_clip", _PYTHON, _OF_LOCAL, _LOCAL),
    *_without("log_max_attention_logit", _PYTHON, _OF_LOCAL, _LOCAL),
    *(
        OptionRule(SCHEDULE, name, Fits("off with dropout and recomputation", _draws_once), _MASKS, _DROP)
        for name in _OF_LOCAL
    ),
    *(
        OptionRule(SCHEDULE, name, Fits("off with --recompute-granularity full", _keeps_layers), _WHOLE, _DROP)
        for name in GRAPH_OPTIONS
    ),
    *(OptionRule(choice, name, off, why, _DROP) for choice, why in _EXCLUDING for name, off in GRAPH_OPTIONS.items()),
    OptionRule(PLANS, "external_cuda_graph", False, _UNMEASURED, _DROP),
    OptionRule(
        PLANS,
        "cuda_graph_warmup_steps",
        Fits("1 or more with --cuda-graph-impl transformer_engine", _warms_up),
        _UNMEASURED,
        "set --cuda-graph-warmup-steps 1",
    ),
)
"""For each choice, the only values that it supports."""

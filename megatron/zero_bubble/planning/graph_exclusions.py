"""What excludes the CUDA graphs of a job: rows like those of ``exclusions.OPTIONS``."""

from __future__ import annotations

from megatron.zero_bubble.core.errors import as_flag
from megatron.zero_bubble.planning.exclusions import (
    LENGTHS,
    OFFLOAD,
    PAIRS,
    PLANS,
    POST_VALIDATION,
    SCHEDULE,
    SHARDS,
    SLICES,
)
from megatron.zero_bubble.planning.rule import Fits, OptionRule

GRAPH_OPTIONS = {"enable_cuda_graph": False, "external_cuda_graph": False, "cuda_graph_impl": "none"}
"""The options that ask for graphs, with what asks for none; before 0.15, graphs have separate flags."""
_ORDER = "Megatron captures CUDA graphs in the order of its own 1F1B"
_DROP = "set --cuda-graph-impl none, or, with --perform-rl-step, drop --rl-training-cuda-graphs"
_MORE = "a later batch size may need more graphs than were captured"
_CANNOT_MOVE = "what a graph keeps for its backward cannot leave the GPU"
_EXCLUDING = (
    (SLICES, "the keys and values of earlier slices are outside of CUDA graphs"),
    (SHARDS, "CUDA graphs read weights where they were when captured"),
    (PAIRS, _ORDER),
    (OFFLOAD, _CANNOT_MOVE),
    (PLANS, "its measurements do not see what CUDA graphs keep, and its plans may need more of them than captured"),
    (LENGTHS, "CUDA graphs are captured for one length"),
    (POST_VALIDATION, "a capture overwrites the gradients of a step that is not validated yet"),
)


def _without(option: str, why: str) -> list[OptionRule]:
    """Rows for an option of Megatron that excludes graphs of layers."""
    works = Fits(
        f"off with {as_flag(option)}",
        lambda given, options: given in (False, "none") or not getattr(options, option, None),
    )
    return [OptionRule(SCHEDULE, name, works, why, _DROP) for name in GRAPH_OPTIONS]


GRAPHS = (
    OptionRule(SCHEDULE, "enable_cuda_graph", False, _ORDER, "give --external-cuda-graph, or drop it"),
    OptionRule(
        SCHEDULE,
        "cuda_graph_impl",
        Fits("none or transformer_engine", lambda given, _: given != "local"),
        _ORDER,
        _DROP,
    ),
    OptionRule(
        SCHEDULE,
        "cuda_graph_impl",
        Fits("none or transformer_engine", lambda given, _: given != "full_iteration"),
        "a graph of a whole iteration has the messages between ranks, and their order in a replay is not defined",
        _DROP,
    ),
    *_without("rampup_batch_size", _MORE),
    *_without("step_batch_size_schedule", _MORE),
    *_without("fine_grained_activation_offloading", _CANNOT_MOVE),
    *(OptionRule(choice, name, off, why, _DROP) for choice, why in _EXCLUDING for name, off in GRAPH_OPTIONS.items()),
)
"""For each choice, the only values that it supports."""

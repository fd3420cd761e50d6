"""What a job captures as CUDA graphs: in planning, and in the run.

Megatron has three implementations: ``local`` and ``transformer_engine`` capture layers or their parts, and
``full_iteration`` a whole iteration. Until 0.14, the first two have options of their own; until 0.17,
``full_iteration`` is a scope of ``local``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron.zero_bubble.core.costs.model import PARTS, Part

LOCAL, ENGINE, ITERATION = "local", "transformer_engine", "full_iteration"
ALL = frozenset(PARTS)
_OF_SCOPE: dict[str, set[Part]] = {
    "attn": {"attention"},
    "mlp": {"mlp"},
    "moe": {"router", "shared experts", "experts"},
    "moe_router": {"router", "shared experts"},
    "moe_preprocess": set(),
    "mamba": {"mamba"},
}
"""What is captured by scope: ``cuda_graph_scope`` until 0.17, ``cuda_graph_modules`` since; without one, whole layers.
Until 0.15, the scopes are ``full`` and ``attn``. A layer has either an MLP or experts."""
MODULES: dict[Part, tuple[str, ...]] = {
    "attention": ("self_attention", "cross_attention"),
    "mlp": ("mlp",),
    "router": ("mlp.router",),
    "shared experts": ("mlp.shared_experts",),
    "experts": ("mlp.experts", "mlp.fc1_latent_proj", "mlp.fc2_latent_proj"),
}
"""Where a layer has its parts that multiply by weights, as attributes."""
PREPROCESSING = ("mlp.fc1_latent_proj",)
"""Where a layer has what multiplies by weights between its router and the dispatch of tokens."""
OPTIONS = {"enable_cuda_graph": LOCAL, "external_cuda_graph": ENGINE, "cuda_graph_impl": None}
"""The options that ask for graphs: the older ones for one implementation, the newer one names it."""
_SCOPES = ("cuda_graph_modules", "cuda_graph_scope")


@dataclass(frozen=True)
class Graphs:
    """What a job captures.

    Attributes:
        implementation: of Megatron; one of the names above.
        inside: the parts of layers inside of graphs.
        preprocesses: whether what comes between the router and the dispatch of tokens is inside.
    """

    implementation: str
    inside: frozenset[Part]
    preprocesses: bool = False

    @property
    def whole_layers(self) -> bool:
        """Whether no part of a layer is outside."""
        return self.inside == ALL


def graphs_of(options: Any) -> Graphs | None:
    """Return what the training of a job captures; None for nothing.

    Args:
        options: the flags of a job, or the configuration of a model; missing ones count as disabled.
    """
    if (implementation := _implementation(options)) is None or captures_only_rollouts(options):
        return None
    scopes = _scopes(options)
    if implementation == ITERATION or ITERATION in scopes:
        return Graphs(ITERATION, ALL)
    if implementation == LOCAL:
        return Graphs(LOCAL, ALL)  # this package captures whole stages
    named = [_OF_SCOPE[scope] for scope in scopes if scope in _OF_SCOPE]
    inside = frozenset().union(*named) if named else ALL
    if getattr(options, "moe_shared_expert_overlap", False) and "experts" not in inside:
        inside -= {"shared experts"}
    return Graphs(implementation, inside, "moe_preprocess" in scopes)


def captures_only_rollouts(options: Any) -> bool:
    """Whether the graphs of a job are for the rollouts of reinforcement learning; Megatron turns them off for training
    unless configured otherwise.
    """
    return bool(getattr(options, "perform_rl_step", False)) and not getattr(options, "rl_training_cuda_graphs", False)


def _implementation(options: Any) -> str | None:
    named = getattr(options, "cuda_graph_impl", None)
    if named not in (None, "none"):
        return str(named)
    return next((older for option, older in OPTIONS.items() if older and getattr(options, option, False)), None)


def _scopes(options: Any) -> tuple[str, ...]:
    value = next((found for name in _SCOPES if (found := getattr(options, name, None))), ())
    values: Iterable[Any] = value if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    return tuple(word for each in values for word in str(getattr(each, "name", each)).replace(",", " ").split())

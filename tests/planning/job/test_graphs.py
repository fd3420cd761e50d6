"""What a job captures, by the options of every version of Megatron."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.planning.job.graphs import ALL, graphs_of

Scope = Enum("Scope", ["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba", "full_iteration"])
ENGINE = {"cuda_graph_impl": "transformer_engine"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"cuda_graph_impl": "none", "cuda_graph_scope": ["attn"]}, None),
        ({"external_cuda_graph": True, "cuda_graph_scope": "full"}, ("transformer_engine", ALL)),
        ({"external_cuda_graph": True, "cuda_graph_scope": "attn"}, ("transformer_engine", {"attention"})),
        ({"enable_cuda_graph": True}, ("local", ALL)),
        (ENGINE, ("transformer_engine", ALL)),
        (ENGINE | {"cuda_graph_scope": [Scope.attn, Scope.mlp]}, ("transformer_engine", {"attention", "mlp"})),
        (
            ENGINE | {"cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"]},
            ("transformer_engine", {"attention", "router", "shared experts"}),
        ),
        (
            ENGINE | {"cuda_graph_modules": ["moe_router"], "moe_shared_expert_overlap": True},
            ("transformer_engine", {"router"}),
        ),
        (ENGINE | {"cuda_graph_modules": ["moe"]}, ("transformer_engine", {"router", "shared experts", "experts"})),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.full_iteration]}, ("full_iteration", ALL)),
        ({"cuda_graph_impl": "full_iteration"}, ("full_iteration", ALL)),
        (ENGINE | {"perform_rl_step": True}, None),
        (ENGINE | {"perform_rl_step": True, "rl_training_cuda_graphs": True}, ("transformer_engine", ALL)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",  # sets have another order in every process
)
def test_graphs_of(options: dict[str, Any], expected: tuple[str, Any] | None) -> None:
    found = graphs_of(SimpleNamespace(**options))
    assert (None if found is None else (found.implementation, found.inside)) == expected

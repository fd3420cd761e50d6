"""What CUDA graphs of whole stages exclude is refused in one sentence, before training starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.graphs import LOCAL as STAGES
from megatron.zero_bubble.planning.job.graphs import graphs_of
from megatron.zero_bubble.planning.job.options import check_options
from megatron.zero_bubble.planning.run_options import RunOptions

LOCAL, OLDER = {"cuda_graph_impl": "local", "cuda_graph_scope": []}, {"enable_cuda_graph": True}
PLAIN = {"num_moe_experts": None, "fp8": None, "fp4": None, "is_hybrid_model": False, "variable_seq_lengths": False}


def check(options: dict[str, Any], **setup: Any) -> None:
    run = RunOptions(ZeroBubbleConfig(**{"schedule": "zb-h1", **setup}).setup)
    check_options(SimpleNamespace(**{**PLAIN, **options}), run)


@pytest.mark.parametrize("asks", [LOCAL, OLDER], ids=["0.15 and later", "until 0.14"])
def test_dense_models_of_one_length_are_accepted(asks: dict[str, Any]) -> None:
    graphs = graphs_of(SimpleNamespace(**asks))
    assert graphs is not None and graphs.implementation == STAGES
    check(asks)
    check(asks, post_validation=True)
    check(asks, schedule="zb-auto")
    check(asks, vocabulary=2)


@pytest.mark.parametrize("asks", [LOCAL, OLDER], ids=["0.15 and later", "until 0.14"])
@pytest.mark.parametrize(
    ("options", "setup", "said"),
    [
        (
            {"num_moe_experts": 8},
            {},
            "off with --num-moe-experts, because experts get other numbers of tokens .*; set --cuda",
        ),
        ({"fp8": "hybrid"}, {}, "off with --fp8, .* scales in Python"),
        ({"is_hybrid_model": True}, {}, "TransformerBlock"),
        ({"variable_seq_lengths": True}, {}, "microbatches of different lengths need .* captured for one length"),
        ({"fine_grained_activation_offloading": True}, {}, "cannot leave the GPU"),
        ({}, {"schedule": "seq-zb-h1"}, "schedules with sequence slices need .* earlier slices"),
        ({}, {"offload": "all"}, "schedules with offloading need .* cannot leave the GPU"),
        ({}, {"schedule": "zero-pp", "shard_weights": True}, "sharded units need .* where they were when captured"),
        (
            {},
            {"schedule": "dualpipe-v", "overlap_experts": True},
            "hide the all-to-all of experts need .* order of its own 1F1B",
        ),
        ({"cuda_graph_scope": "full_iteration"}, {}, "cuda_graph_scope .* messages between ranks"),
    ],
    ids=lambda value: next(iter(value.values()), None) if isinstance(value, dict) else None,
)
def test_what_is_refused(asks: dict[str, Any], options: dict[str, Any], setup: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        check({**asks, **options}, **setup)
    assert "--cuda-graph-impl none" in str(caught.value)


def test_graphs_of_whole_iterations_are_refused() -> None:
    with pytest.raises(UserError, match="need cuda_graph_impl to be none, local or transformer_engine"):
        check({"cuda_graph_impl": "full_iteration"})

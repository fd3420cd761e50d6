"""Tests of the table of models against the numbers of parameters that their authors publish."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.cli.catalogue.models import MODELS
from megatron.zero_bubble.cli.megatron_job import parsed_megatron_job
from megatron.zero_bubble.planning.job.arguments.parser import flags_of
from megatron.zero_bubble.planning.job.model import model_of

BILLIONS: dict[str, tuple[float, float | None]] = {
    "meta-llama/Llama-2-7b-hf": (6.74, None),
    "meta-llama/Llama-3.2-1B": (1.24, None),
    "meta-llama/Llama-3.2-3B": (3.21, None),
    "meta-llama/Meta-Llama-3-8B": (8.03, None),
    "meta-llama/Meta-Llama-3.1-8B": (8.03, None),
    "meta-llama/Meta-Llama-3-70B": (70.6, None),
    "meta-llama/Meta-Llama-3.1-70B": (70.6, None),
    "meta-llama/Meta-Llama-3.1-405B": (405.9, None),
    "Qwen/Qwen2-72B": (72.7, None),
    "Qwen/Qwen2.5-14B": (14.8, None),
    "Qwen/Qwen2.5-32B": (32.8, None),
    "Qwen/Qwen2.5-72B": (72.7, None),
    "Qwen/Qwen3-14B": (14.8, None),
    "Qwen/Qwen3-32B": (32.8, None),
    "Qwen/Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen/Qwen3-235B-A22B": (235, 22),
    "deepseek-ai/DeepSeek-V2-Lite": (15.7, 2.4),
    "deepseek-ai/DeepSeek-V2": (236, 21),
    "deepseek-ai/DeepSeek-V3": (671, 37),
    "moonshotai/Kimi-K2-Instruct": (1026, 32),
    "openai/gpt-oss-20b": (20.9, 3.6),
    "openai/gpt-oss-120b": (116.8, 5.1),
    "zai-org/GLM-4.5": (355, 32),
    "zai-org/GLM-4.5-Air": (107, 12),
}
"""Parameters, and of models with experts those that process a token, in 10^9, as published: the second without the
embedding, both without multi-token prediction."""


def parameters(name: str) -> tuple[float, float]:
    """The same by the table of models, in units of 10^9."""
    job = "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8 --lr 1 --bf16"
    args = parsed_megatron_job((*flags_of(MODELS[name]), *job.split(), "--train-iters", "1"), 1, 1).args
    model = model_of(args, (args.num_layers,))
    embedding = model.vocab_size * model.hidden
    ends = embedding * (1 + MODELS[name]["untie_embeddings_and_output_weights"])
    layers = [(model.weights_of(kind), model.expert_weights_of(kind)) for kind in model.kinds]
    used = 0.0 if model.experts is None else model.experts.top_k / model.experts.count
    total = ends + sum(all_weights for all_weights, _ in layers)
    active = embedding + sum(all_weights - (1 - used) * of_experts for all_weights, of_experts in layers)
    return total / 1e9, active / 1e9


def test_all_models_are_compared() -> None:
    assert set(BILLIONS) == set(MODELS)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_parameters_are_those_that_are_published(name: str) -> None:
    total, active = BILLIONS[name]
    found = parameters(name)
    assert found[0] == pytest.approx(total, rel=0.01)
    assert active is None or found[1] == pytest.approx(active, rel=0.08)

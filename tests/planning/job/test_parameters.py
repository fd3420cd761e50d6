"""Tests of the bytes of weights, gradients and optimizer states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.core.costs.static import ParameterBytes
from megatron.zero_bubble.planning.job.parameters import optimizer_replicas, parameter_bytes

AWARE = {"use_precision_aware_optimizer": True}
MOMENTS = {**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}
FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise"}


def args(**options: Any) -> SimpleNamespace:
    """The flags that matter."""
    defaults = {"bf16": True, "fp16": False, "grad_reduce_in_bf16": False, "optimizer": "adam"}
    return SimpleNamespace(**{**defaults, **options})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (2, 4, 12, 2)),
        ({"bf16": False}, (4, 4, 8, 4)),
        ({"optimizer": "sgd"}, (2, 4, 8, 2)),
        ({"optimizer": "muon"}, (2, 4, 8, 2)),
        ({"grad_reduce_in_bf16": True}, (2, 2, 12, 2)),
        ({"exp_avg_dtype": "bf16", "main_grads_dtype": "bf16"}, (2, 4, 12, 2)),  # without the optimizer that reads them
        (AWARE, (2, 4, 10, 2)),  # of float32 weights, it stores what those in bf16 lack
        ({**AWARE, "bf16": False, "fp16": True}, (2, 4, 12, 2)),
        ({**AWARE, "bf16": False, "fp16": True, "main_params_dtype": "fp16"}, (2, 4, 10, 2)),
        ({**AWARE, "main_grads_dtype": "bf16"}, (2, 2, 10, 2)),
        ({**AWARE, "main_grads_dtype": "torch.bfloat16"}, (2, 2, 10, 2)),
        ({**AWARE, "main_grads_dtype": "bf16", "accumulate_allreduce_grads_in_fp32": True}, (2, 4, 10, 2)),
        (MOMENTS, (2, 4, 2 + 2 + 1, 2)),
        ({**MOMENTS, "optimizer_cpu_offload": True}, (2, 4, 0, 2)),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25}, (2, 4, 9, 2)),
        ({"offload_optimizer_states": True}, (2, 4, 0, 2)),
        (FP8, (2, 4, 12, 4)),
        ({**FP8, **MOMENTS, "fp8_param_gather": True}, (2, 4, 4 + 3, 2)),
        ({**FP8, "fp8_recipe": "mxfp8", "fp8_param_gather": True}, (2, 4, 12, 2 + 1 / 16)),
        ({"fp4": "e2m1"}, (2, 4, 12, 2 + 1 + 1 / 8)),
        ({"fp4": "e2m1", "fp4_param_gather": True}, (2, 4, 12, 1 + 1 / 8)),
    ],
)
def test_bytes(options: dict[str, Any], expected: tuple[float, ...]) -> None:
    """Of a weight, its gradient, its states, and a weight of layers."""
    assert parameter_bytes(args(**options)) == ParameterBytes(*expected)


@pytest.mark.parametrize(
    ("options", "replicas"),
    [
        ({}, (32, 4)),
        ({"use_distributed_optimizer": False}, (1, 1)),
        ({"num_distributed_optimizer_instances": 4}, (8, 1)),
    ],
)
def test_replicas(options: dict[str, Any], replicas: tuple[int, int]) -> None:
    """Experts on 16 ranks have fewer, and instances of the optimizer divide among a part of them."""
    sizes = {
        "use_distributed_optimizer": True,
        "data_parallel_size": 16,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 16,
        "expert_tensor_parallel_size": 1,
        "tensor_model_parallel_size": 2,
    }
    assert optimizer_replicas(args(**{**sizes, **options})) == replicas

"""Sequence parallelism without tensor parallelism, which Megatron-LM and Megatron-Bridge switch off."""

from __future__ import annotations

from typing import Any


def without_sequence_parallelism(args: Any) -> list[str]:
    """Switch sequence parallelism off where a job has one tensor-parallel rank, and return a line that says so."""
    if not args.sequence_parallel or args.tensor_model_parallel_size > 1:
        return []
    args.sequence_parallel = False
    return ["--sequence-parallel has no effect with --tensor-model-parallel-size 1, as in Megatron-LM"]

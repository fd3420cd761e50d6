"""Checkpoints of a divided vocabulary, in the format of megatron-core's whole layers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron.zero_bubble.engine.kernels.vocabulary import ShardRows

EMBEDDING, OUTPUT = "embedding.word_embeddings.", "output_layer."
"""Names of the modules, as prefixes of the names of their weights."""
EXTRA_STATE = "_extra_state"


def sharded(key: str, weight: torch.Tensor, rows: ShardRows, num_shards: int, is_copy: bool = False) -> ShardedTensor:
    """The rows of a rank as a part of the whole layer's weight, whose padding may differ between checkpoints.

    Args:
        key: the name of the whole layer's weight.
        is_copy: whether the rows are saved elsewhere, so that this entry is only loaded.
    """
    replica = int(is_copy), 0, parallel_state.get_data_parallel_rank(with_context_parallel=True)
    # The optimizer finds its parameters in the state dict by identity, and must not find the copy.
    data = weight.detach() if is_copy else weight
    offset = 0, rows.first // rows.num_rows, num_shards
    return ShardedTensor.from_rank_offsets(key, data, offset, replica_id=replica, allow_shape_mismatch=True)


def extra_state(prefix: str) -> dict[str, Any]:
    """The empty entry that checkpoints of hybrid models have of the output layer; a GPT drops it."""
    key = f"{prefix}{EXTRA_STATE}"
    tensor = parallel_state.get_tensor_model_parallel_rank()
    replica = 0, tensor, parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return {key: ShardedObject(key, None, (1,), (0,), replica)}

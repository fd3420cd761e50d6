"""Copies of weights that are shards, for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica

from megatron.zero_bubble.integration.adapter.shards import ShardedUnits


def copy_weights(units: ShardedUnits, of_chunks: Sequence[dict[str, Any]], on_every_replica: bool = False) -> None:
    """Copy weights to host memory, one chunk after the other; a collective call of the replicas.

    Args:
        of_chunks: megatron-core's sharded state dicts of the chunks; they are changed in place.
        on_every_replica: whether any replica may save a weight. Otherwise, ranks that save none of them get only their
            shapes.
    """

    def copy(part: Any) -> Any:
        if not isinstance(part, ShardedTensor | ShardedTensorFactory):
            return part
        whole = part.data.detach()
        is_saved = on_every_replica or is_main_replica(part.replica_id)
        return replace(part, data=whole.to("cpu", copy=True) if is_saved else whole.to("meta"))

    for index, contents in enumerate(of_chunks):
        with units.whole_weights(index):
            dict_list_map_inplace(copy, contents)

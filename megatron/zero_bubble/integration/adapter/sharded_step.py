"""Optimizer steps on shards: megatron-core's distributed optimizer reads and writes shards instead of whole buffers.

The distributed optimizer steps only the parts of this replica, but finds their gradients in whole buffers, writes the
new weights into whole buffers, and gathers all weights after its step. For chunks that stay shards, the parts are
tensors of their own: two methods of the optimizer are replaced by ones that find them there, and nothing is gathered,
because the next pass that needs weights does so. The state of the optimizer, and so its checkpoints, are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.runtime.shards import OwnShards
from megatron.zero_bubble.planning.exclusions import SHARDS
from megatron.zero_bubble.planning.job.options import check_options_of

_GATHER_SINCE_0_18 = "start_param_sync_for_bucket_group_subset"
"""Gathers weights after a step; before, the optimizer calls ``start_param_sync`` of its chunks."""


class SteppedChunk(NamedTuple):
    """A model chunk, and those of its buffers that are shards."""

    model: DistributedDataParallel
    buffers: Sequence[Any]


class BucketPlace(NamedTuple):
    """The shards of a chunk, and the number of a bucket among them."""

    shards: OwnShards
    number: int


def check_optimizer(optimizer: Any) -> None:
    """Raise UserError for an optimizer that cannot step shards."""
    for part in _parts(optimizer):
        if not isinstance(part, DistributedOptimizer):
            raise UserError(
                "sharded units step shards with megatron-core's DistributedOptimizer; got "
                f"{type(part).__name__}; give --use-distributed-optimizer"
            )
        check_options_of(SHARDS, part.config)
        if getattr(part.config, "use_precision_aware_optimizer", False):
            raise UserError(
                "sharded units step shards only with an optimizer that takes gradients in float32 in this version; got "
                "use_precision_aware_optimizer=True; leave it out, or do not call step_shards"
            )


def step_shards(
    optimizer: Any, chunks: Sequence[SteppedChunk], places: Mapping[int, BucketPlace], restored: ExitStack
) -> None:
    """Let ``optimizer`` step shards until ``restored`` is closed.

    Args:
        chunks: the model chunks, which the optimizer gathers no more.
        places: by ``id`` of a bucket. An optimizer of other buckets, those of experts that stay whole, steps these as
            before.
    """

    def replaced(owner: Any, name: str, by: Callable[..., None]) -> None:
        setattr(owner, name, by)
        restored.callback(delattr, owner, name)

    for model, buffers in chunks:
        replaced(model, "start_param_sync", _nothing)
        for buffer in buffers:
            replaced(buffer, "reset", _nothing)  # it would write zeros where no memory is
    for part in _parts(optimizer):
        if part.is_stub_optimizer:
            continue
        if _is_placed(part, places):
            step = _Step(part, places)
            step.move_weights()
            restored.callback(step.return_weights)
            replaced(part, "_copy_model_grads_to_main_grads", step.find_gradients)
            replaced(part, "_copy_main_params_to_model_params", step.write_weights)
        if hasattr(part, _GATHER_SINCE_0_18):
            replaced(part, _GATHER_SINCE_0_18, _nothing)


def _is_placed(part: Any, places: Mapping[int, BucketPlace]) -> bool:
    """Whether the buckets of an optimizer are shards; that of experts has none on a rank without experts."""
    placed = {id(bucket) in places for buffer in part.buffers for bucket in buffer.buckets}
    assert len(placed) <= 1, "the optimizer of experts has no other parameters"
    return True in placed


class _Step:
    """The steps of one distributed optimizer."""

    def __init__(self, part: Any, places: Mapping[int, BucketPlace]) -> None:
        self._part, self._places = part, places

    def move_weights(self) -> None:
        """Make the optimizer's views of own parts refer to the shards."""
        for model, view, _ in self._parameters():
            place, start, end = self._place(model)
            view.data = place.shards.weights[place.number][start:end]

    def return_weights(self) -> None:
        """Make the optimizer's views refer to the parameters again."""
        for model, view, _ in self._parameters():
            within = self._part._get_model_param_range_map(model)["param"]
            view.data = model.detach().view(-1)[within.start : within.end]

    def find_gradients(self) -> None:
        """Upstream: ``DistributedOptimizer._copy_model_grads_to_main_grads``."""
        for model, _, main in self._parameters():
            place, start, end = self._place(model)
            assert place.shards.gradients is not None, "passes have reduced gradients"
            main.grad = place.shards.gradients[place.number][start:end].float()

    def write_weights(self) -> None:
        """Upstream: ``DistributedOptimizer._copy_main_params_to_model_params``."""
        for _, view, main in self._parameters():
            if main is not view:
                view.data.copy_(main)

    def _parameters(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Every parameter of the model that has a part here, the optimizer's view of that part, and what it steps."""
        part = self._part
        mains_of_halves = part.shard_fp32_from_float16_groups
        for models, views, mains in (
            *zip(part.model_float16_groups, part.shard_float16_groups, mains_of_halves, strict=True),
            *zip(part.model_fp32_groups, part.shard_fp32_groups, part.shard_fp32_groups, strict=True),
        ):
            yield from zip(models, views, mains, strict=True)

    def _place(self, model: torch.Tensor) -> tuple[BucketPlace, int, int]:
        buffer, _, bucket = self._part.model_param_gbuf_map[model]
        within = self._part._get_model_param_range_map(model)["gbuf_local"]
        return self._places[id(self._part.buffers[buffer].buckets[bucket])], within.start, within.end


def _parts(optimizer: Any) -> Sequence[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Take the place of a method that needs memory which shards do not have."""

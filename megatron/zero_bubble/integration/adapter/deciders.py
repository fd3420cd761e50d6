"""Which ranks decide for which others, while plans are made during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.engine.runtime.groups import backend_of, ranks_of, torchs
from megatron.zero_bubble.engine.runtime.observer import IterationStart


@dataclass(frozen=True)
class Deciders:
    """Who decides for whom: the first of some ranks for all of them.

    Attributes:
        groups: of the job, in which the decision of the first rank is passed on, one after the other.
        of_replica: whether every replica decides for itself, or those together that exchange tokens with experts, which
            must run the same passes in the same order.
    """

    groups: tuple[dist.ProcessGroup, ...]
    of_replica: bool

    @classmethod
    def of(cls, start: IterationStart) -> Deciders:
        if not start.varies:
            assert dist.group.WORLD is not None
            return cls((dist.group.WORLD,), False)
        within = (
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
            parallel_state.get_tensor_model_parallel_group(),
        )
        return cls(tuple(map(torchs, (*within, start.group))), True)

    @property
    def is_first(self) -> bool:
        return all(group.rank() == 0 for group in self.groups)

    def number(self, own: int) -> int:
        for group in self.groups:
            box = self._box(group, own)
            dist.broadcast(box, ranks_of(group)[0], group)
            own = int(box.item())
        return own

    def any(self, own: bool) -> bool:
        """Whether something holds on any rank."""
        for group in self.groups:
            box = self._box(group, int(own))
            dist.all_reduce(box, dist.ReduceOp.MAX, group)
            own = bool(box.item())
        return own

    @staticmethod
    def _box(group: dist.ProcessGroup, number: int) -> torch.Tensor:
        return torch.tensor([number], device="cpu" if backend_of(group) == "gloo" else "cuda")

    def broadcast(self, box: list[Any]) -> None:
        """Fill ``box`` with what the first rank has in it."""
        for group in self.groups:
            dist.broadcast_object_list(box, ranks_of(group)[0], group)

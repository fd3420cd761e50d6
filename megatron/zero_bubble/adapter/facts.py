"""What is known about one iteration of one rank before its passes run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron.zero_bubble.adapter.boundary import Boundary
from megatron.zero_bubble.adapter.prepared import Prepared
from megatron.zero_bubble.adapter.stage import StepArguments
from megatron.zero_bubble.adapter.staging import Links
from megatron.zero_bubble.ir import Slices
from megatron.zero_bubble.runtime.observer import IterationObserver


class Call(NamedTuple):
    """One call of the forward-backward function.

    Attributes:
        iterators: the data iterator of every chunk.
        boundary: makes the boundary for the slices of a schedule.
        is_uneven: whether replicas may run different numbers of microbatches.
    """

    step: StepArguments
    groups: Any
    chunks: list[torch.nn.Module]
    iterators: list[Any]
    boundary: Callable[[Slices], Boundary]
    force_all_reduce: bool | None
    is_uneven: bool


@dataclass(frozen=True)
class IterationFacts:
    """One iteration on one rank, as its parts see it.

    Attributes:
        prepared: the plan, and the facts about the stages of this rank.
        call: the arguments of the iteration.
        boundary: the tensors that cross the boundaries between stages.
        links: move values between ranks.
        observer: is notified of every op, message and wait; None if the iteration is not observed.
    """

    prepared: Prepared
    call: Call
    boundary: Boundary
    links: Links
    observer: IterationObserver | None

    @property
    def forward_only(self) -> bool:
        return self.call.step.forward_only

"""A part of a pipeline: what a feature adds to its plans and to its iterations.

A pipeline holds a list of parts and asks all of them the same questions, so a feature is added as a part, without a
change of the pipeline (``tests/opening/test_a_new_part.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.ir import Op, Plan, Schedule
from megatron.zero_bubble.engine.platforms import Platform
from megatron.zero_bubble.engine.runtime.handler import Handler
from megatron.zero_bubble.engine.runtime.handlers import Channels, Stage
from megatron.zero_bubble.engine.runtime.observer import IterationObserver
from megatron.zero_bubble.engine.runtime.saved import SavedTensors
from megatron.zero_bubble.engine.runtime.watchdog import Watchdog
from megatron.zero_bubble.integration.adapter.boundary import Boundary
from megatron.zero_bubble.integration.adapter.finalize import Finalize
from megatron.zero_bubble.integration.adapter.lengths import Lengths
from megatron.zero_bubble.integration.adapter.prepared import Lowering, PreparedPlan
from megatron.zero_bubble.integration.adapter.stage import StageParts, StepArguments
from megatron.zero_bubble.integration.adapter.staging import Carriers


class Joined(NamedTuple):
    """A rank that is connected to the other ranks of its pipeline, and is about to run a new plan.

    Attributes:
        platform: that of the devices whose memory is sent.
        watchdog: with NCCL, follows the waits of the GPU; None if the host waits.
        saved: the hooks that collect what forwards save.
    """

    group: dist.ProcessGroup
    plan: Plan
    platform: Platform
    watchdog: Watchdog | None
    saved: SavedTensors


class Call(NamedTuple):
    """One call of the forward-backward function.

    Attributes:
        iterators: the data iterator of every chunk.
        boundary: makes the boundary for the stages of a schedule, from what all ranks know of the lengths.
        lengths: what this rank knows of the lengths of the microbatches.
    """

    step: StepArguments
    groups: Any
    chunks: list[torch.nn.Module]
    iterators: list[Any]
    boundary: Callable[[Lengths, Schedule], Boundary]
    force_all_reduce: bool | None
    lengths: Lengths


@dataclass(frozen=True)
class IterationFacts:
    """One iteration on one rank, as its parts see it.

    Attributes:
        prepared: the plan, and the facts about the stages of this rank.
        call: the arguments of the iteration.
        boundary: the tensors that cross the boundaries between stages.
        links: move values between ranks.
        channels: makes what moves messages while a plan runs.
        observer: is notified of every op, message and wait; None if the iteration is not observed.
    """

    prepared: PreparedPlan
    call: Call
    boundary: Boundary
    links: Carriers
    channels: Callable[[], Channels]
    observer: IterationObserver | None

    @property
    def forward_only(self) -> bool:
        return self.call.step.forward_only


class Part:
    """A part of a pipeline. Each method does nothing by default; they are described in the order of their calls."""

    def begin(self, call: Call) -> None:
        """Called first in every iteration, before its schedule is made. It may make collective calls."""

    def lowering(self, schedule: Schedule, forward_only: bool) -> Lowering | None:
        """What the part adds to the plan of an iteration; None for nothing. Called in every iteration."""

    def check(self, config: Any, schedule: Schedule) -> None:
        """Raise UserError if the part does not support a new schedule, or the job's model configuration."""

    def connect(self, to: Joined) -> None:
        """Prepare for a new plan, which is the same on all ranks of the pipeline. A collective call."""

    def stages(self, iteration: IterationFacts, chunks: Sequence[StageParts]) -> Mapping[int, Stage]:
        """Stages by number that replace the usual ones of this rank; ``chunks`` are what they are made of."""
        return {}

    def iteration(self, iteration: IterationFacts) -> AbstractContextManager[None]:
        """Context around the passes of an iteration, entered when the stages are made, and again if they are rerun."""
        return nullcontext()

    def handlers(self, iteration: IterationFacts) -> Mapping[type[Op], Handler]:
        """The handlers of the part's own ops, made within ``iteration``."""
        return {}

    def replacing(self, iteration: IterationFacts, basic: Mapping[type[Op], Handler]) -> Mapping[type[Op], Handler]:
        """What runs passes or messages in place of the handlers ``basic``; called after ``handlers``."""
        return {}

    def finalizing(self, finalize: Finalize) -> Finalize:
        """What runs in place of Megatron's steps for the gradients of some chunks, after the passes."""
        return finalize

    @property
    def num_pending(self) -> int:
        """Number of values that the part keeps; 0 between iterations."""
        return 0

    def close(self) -> None:
        """Free everything and disconnect; ``connect`` may be called again."""

"""What the registry knows of a schedule: how to build it, and what to expect of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.zero_bubble.ir import Schedule


@dataclass(frozen=True)
class Recipe:
    """A named way to order the passes.

    ``build(num_ranks, num_microbatches)`` makes the schedule. ``bubble`` is the idle time of the longest rank without
    communication and ``memory`` the peak over ranks, as formulas in p ranks, the durations F, B, W of a rank and the
    activation M of a microbatch on a rank; both hold once there are enough microbatches to fill the pipeline.
    """

    name: str
    summary: str
    bubble: str
    memory: str
    build: Callable[[int, int], Schedule]

"""Say so if a loop steps its optimizer before the schedule in force has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from megatron.zero_bubble.integration.adapter.pipeline import Pipeline


def watch_first_step(schedule: str, pipeline: Pipeline, say: Callable[[str], None]) -> RemovableHandle:
    """Print one line after the first step of any optimizer in this process, unless the schedule has run by then.

    Args:
        schedule: its name.
        pipeline: runs the schedule; if it has, it knows the size of its microbatches.

    Returns:
        what ends the watch.
    """
    is_first = True

    def stepped(*_: Any) -> None:
        nonlocal is_first
        if is_first and pipeline.microbatch == (0, 0):
            say(
                f"schedule {schedule} is applied, but it has not run before the first step of an optimizer: the loop "
                "has one pipeline rank, or does not call the function that megatron-core's get_forward_backward_func() "
                "returns"
            )
        is_first = False

    return register_optimizer_step_post_hook(stepped)

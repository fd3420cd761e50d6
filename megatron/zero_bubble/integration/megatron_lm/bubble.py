"""``--zero-bubble-log-bubble`` in a Megatron-LM job: one log line per ``--log-interval``, and TensorBoard scalars."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.engine.measure.bubble_meter import BubbleMeter
from megatron.zero_bubble.engine.platforms import select


class JobBubble(BubbleMeter):
    """Measure the bubble of a job's training iterations, and log it.

    Args:
        args: the job's validated arguments, read during training, because Megatron sets their iteration count late.
    """

    def __init__(self, args: Any) -> None:
        super().__init__(select("auto"))
        self._args = args
        self._logged = 0

    def end_iteration(self, completed: bool) -> None:
        super().end_iteration(completed)
        iteration = self._args.curr_iteration + 1
        if completed and iteration % self._args.log_interval == 0 and iteration != self._logged:
            self._logged = iteration  # Megatron runs an iteration again if its loss is suspicious
            self._log(iteration)

    def _log(self, iteration: int) -> None:
        """Log the bubble on the last rank, where Megatron logs; a collective call."""
        bubble = self.read(parallel_state.get_pipeline_model_parallel_group())
        if bubble is None or dist.get_rank() != dist.get_world_size() - 1:
            return
        print(f"zero-bubble: iteration {iteration}: {bubble}", flush=True)
        from megatron.training import global_vars  # exists only in a Megatron-LM job

        writer = global_vars.get_tensorboard_writer()
        if writer is not None:
            writer.add_scalar("zero-bubble/measured", bubble.measured, iteration)
            writer.add_scalar("zero-bubble/planned", bubble.planned, iteration)
            writer.add_scalar("zero-bubble/idle", bubble.idle, iteration)
            writer.add_scalar("zero-bubble/planned-idle", bubble.planned_idle, iteration)

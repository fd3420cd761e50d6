"""``--zero-bubble-log-bubble`` in a Megatron-LM job: a line every --log-interval, and scalars beside its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.measure.bubble_meter import BubbleMeter
from megatron.zero_bubble.platforms import select


class JobBubble:
    """Measures the bubble of a job's training iterations.

    Args:
        args: the job's, validated; read when it trains, because it counts its iterations late.
    """

    def __init__(self, args: Any) -> None:
        self.meter = BubbleMeter(select("auto"))
        self._args = args
        self._logged = 0

    def around(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, measured."""

        @functools.wraps(forward_backward)
        def measured(**call: Any) -> Any:
            if call.get("forward_only"):
                return forward_backward(**call)
            result = self.meter.around_passes(lambda: forward_backward(**call))
            iteration = self._args.curr_iteration + 1
            if iteration % self._args.log_interval == 0 and iteration != self._logged:
                self._logged = iteration  # Megatron runs one again where it doubts a loss
                self._log(iteration)
            return result

        return measured

    def _log(self, iteration: int) -> None:
        """On the last rank, as Megatron does."""
        bubble = self.meter.read(parallel_state.get_pipeline_model_parallel_group())
        if bubble is None or dist.get_rank() != dist.get_world_size() - 1:
            return
        print(
            f"zero-bubble: iteration {iteration}: bubble {bubble.measured:.1%} (planned {bubble.planned:.1%})",
            flush=True,
        )
        from megatron.training import global_vars  # only a Megatron-LM job has it

        writer = global_vars.get_tensorboard_writer()
        if writer is not None:
            writer.add_scalar("zero-bubble/measured", bubble.measured, iteration)
            writer.add_scalar("zero-bubble/planned", bubble.planned, iteration)

"""What full recomputation costs under a schedule that splits backwards, in one sentence for the start of a job.

F keeps only the inputs of layers, but B computes the layers again, and what their weight gradients need stays until W:
about as much as without recomputation. A fused backward frees it layer by layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.zero_bubble.core.analysis.memory import peaks_in_order
from megatron.zero_bubble.core.analysis.score import within
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import layer_costs
from megatron.zero_bubble.core.costs.units import format_bytes
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.ir.passes import W
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.core.search.cut import even
from megatron.zero_bubble.planning.job.model import model_of, unestimated_kinds
from megatron.zero_bubble.planning.source import ZB_AUTO, ScheduleSource


def remark(args: Any, source: ScheduleSource | None, num_microbatches: int) -> str | None:
    """Return the sentence; None if the job does not recompute whole layers, or needs no more memory than 1F1B.

    The amounts are estimated for equally many layers per stage, and leave out embedding and logits. They are omitted
    for layers that are not estimated.

    Args:
        args: the checked flags of the job, in our loop or in Megatron-LM.
        source: the schedules of the job; None for Megatron's own.
        num_microbatches: of a training iteration.
    """
    if getattr(args, "recompute_granularity", None) != "full" or source is None or source.name == ZB_AUTO:
        return None  # zb-auto plans within its limit
    schedule = source.make(num_microbatches)
    if all(p.kind is not W for p in schedule.passes()):
        return None
    keeps = "more activations than 1F1B"
    if not unestimated_kinds(args):
        ours, theirs = _of_layers(args, schedule), _of_layers(args, _1f1b(schedule))
        if within(ours, theirs):
            return None
        keeps = f"an estimated {format_bytes(ours)} of activations in the layers of a rank, 1F1B {format_bytes(theirs)}"
    again = "R" if schedule.recomputed else "B"
    return (
        f"with --recompute-granularity full, {schedule.name} keeps {keeps}, because {again} computes whole layers "
        "again and what their weight gradients need stays until W; use --zero-bubble-schedule zb-auto, which fuses B "
        "with W where W does not fit into --zero-bubble-memory-limit, or --recompute-granularity selective"
    )


def _of_layers(args: Any, schedule: Schedule) -> float:
    """Return the bytes of the layers' activations on the fullest rank."""
    layout = even(schedule.placement, args.num_layers)
    sequence = args.seq_length // args.context_parallel_size
    model = replace(model_of(args, layout), sequence=sequence, vocab_size=0)
    _, memory = layer_costs(model, DEVICES["a100"]).on(layout)
    return max(peaks_in_order(schedule, memory))


def _1f1b(schedule: Schedule) -> Schedule:
    return build("1f1b", num_ranks=schedule.num_ranks, num_microbatches=schedule.num_microbatches)

"""What a job with expert parallelism loses where nothing hides its all-to-alls, in one sentence for its start."""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.planning.source import ScheduleSource


def remark(args: Any, source: ScheduleSource | None) -> str | None:
    """Return the sentence; None if the job has no all-to-all of experts, Megatron's own schedule, or overlap of them.

    Args:
        args: the checked flags of the job, in our loop or in Megatron-LM.
        source: the schedules of the job; None for Megatron's own.
    """
    ranks = getattr(args, "expert_model_parallel_size", None) or 1
    if ranks < 2 or source is None or source.overlaps:
        return None
    return (
        f"the all-to-all of experts over {ranks} ranks is not hidden by schedule {source.name}; where it takes about "
        "18 % of a microbatch or more, --zero-bubble-schedule interleaved-1f1b --zero-bubble-overlap-experts is "
        "shorter: record the costs, and see zero-bubble compare --pairs, and docs/experts.md"
    )

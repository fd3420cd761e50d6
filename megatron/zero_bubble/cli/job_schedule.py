"""The schedule of a job as its flags say."""

from __future__ import annotations

import argparse

from megatron.zero_bubble.analysis.timeline import Metric
from megatron.zero_bubble.cli.stock import stock_schedule
from megatron.zero_bubble.ir import WHOLE, Schedule
from megatron.zero_bubble.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.question import of_run
from megatron.zero_bubble.planning.source import AUTO_LIMIT, DEFAULT_LIMIT, ZB_AUTO, ScheduleSource


def job_schedule(args: argparse.Namespace, costs: Figures, num_microbatches: int) -> Schedule:
    """Return the schedule that the run would use for this number of microbatches; within 1F1B's memory if it measures
    its limit.
    """
    if args.zero_bubble_schedule == ZB_AUTO:
        config: ZeroBubbleConfig = args.zero_bubble
        objective: Metric = "span" if config.post_validation else "makespan"
        wanted = config.placement, objective, config.cuts() or WHOLE, config.vocabulary, config.num_chunks
        limit = DEFAULT_LIMIT if config.memory_limit in (None, AUTO_LIMIT) else config.memory_limit
        return answer(of_run(costs, limit, *wanted)).schedule
    if args.source is not None:
        source: ScheduleSource = args.source
        return source.make(num_microbatches)
    return stock_schedule(args, costs.num_ranks, num_microbatches)

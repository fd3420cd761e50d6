"""The schedule of a job as its flags say."""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron.zero_bubble.cli.stock import stock_schedule
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.planning.answer import Answer, answer
from megatron.zero_bubble.planning.feasibility import Feasibility
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.question import of_run
from megatron.zero_bubble.planning.setup import AUTO_LIMIT, Searched, Setup
from megatron.zero_bubble.planning.source import ScheduleSource


def job_answer(
    args: argparse.Namespace, costs: Figures, num_microbatches: int, runs: Feasibility | None = None
) -> Answer | None:
    """Return what a run of ``zb-auto`` would plan for this number of microbatches, within 1F1B's memory if it measures
    its limit; None for another schedule, which is known.

    Args:
        runs: what the job has for its plans; None to plan for any GPUs.

    Raises:
        UserError: there is no plan, or none that can run.
    """
    if not isinstance(args.run.setup.order, Searched):
        return None
    config: ZeroBubbleConfig = args.zero_bubble
    setup: Setup = config.setup
    assert isinstance(setup.order, Searched), "zb-auto searches"
    if setup.order.limit == AUTO_LIMIT:
        setup = setup.unmeasured
    return answer(of_run(replace(costs, num_microbatches=num_microbatches), setup, runs))


def job_schedule(args: argparse.Namespace, num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the schedule that a run begins with, for this number of microbatches."""
    if args.source is not None:
        source: ScheduleSource = args.source
        return source.make(num_microbatches)
    return stock_schedule(args, num_ranks, num_microbatches)


def planned_schedule(args: argparse.Namespace, costs: Figures, num_microbatches: int) -> Schedule:
    """Return the schedule that a run would use, whatever its GPUs."""
    made = job_answer(args, costs, num_microbatches)
    return job_schedule(args, costs.num_ranks, num_microbatches) if made is None else made.schedule

"""What Megatron's own schedule takes in the same job, for ``zero-bubble dry-run``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from megatron.zero_bubble.cli.hardware import job_costs
from megatron.zero_bubble.cli.megatron_job import checked_megatron_job
from megatron.zero_bubble.core.analysis.score import length_ms, within
from megatron.zero_bubble.core.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.core.errors import Refusal, attempted
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.integration.megatron_lm.fork_flags import modernize
from megatron.zero_bubble.planning.experts import build_hiding
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.job.flags import given_in
from megatron.zero_bubble.planning.observations import Observations
from megatron.zero_bubble.planning.run_options import RunOptions


def stock_schedule(args: argparse.Namespace, num_ranks: int, num_microbatches: int) -> Schedule:
    """Megatron's own schedule for a job without a zero-bubble schedule, by its checked flags."""
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    chunks = args.virtual_pipeline_model_parallel_size
    if not chunks:
        return build("1f1b", **sizes)
    is_combined = getattr(args, "overlap_moe_expert_parallel_comm", False)
    return (build_hiding if is_combined else build)("interleaved-1f1b", **sizes, num_chunks=chunks)


def against_stock(
    options: argparse.Namespace, job: Sequence[str], costs: Figures, timeline: Timeline, objective: Metric
) -> str:
    """Return a sentence that compares the job's schedule with the one that Megatron runs without our flags.

    Args:
        options: the options of ``dry-run``.
        job: the flags of the job.
        costs: the figures of the job under its own schedule.
        timeline: the job's schedule with these figures.
        objective: what an iteration takes under it: its span with post-validation, else its makespan.
    """
    without = attempted(partial(_stock, options, job, costs))
    if isinstance(without, Refusal):
        return f"Without the zero-bubble flags, the job does not run: {without.reason}"
    schedule, stock_ms = without.schedule, without.makespan_ms
    own, own_ms = timeline.schedule, length_ms(timeline, objective)
    chunks = schedule.num_stages // schedule.num_ranks
    stock = schedule.name + (f" with {chunks} stages per rank" if chunks > 1 else "")
    # Measured stages are divided evenly into finer ones, though a layer cannot be divided.
    least = "at least " if options.costs is not None and schedule.num_stages > own.num_stages else ""
    than = f"{abs(own_ms / stock_ms - 1):.1%} {'less' if own_ms < stock_ms else 'more'} time"
    if within(own_ms, stock_ms) and within(stock_ms, own_ms):
        than = "as long"
    return f"Without the zero-bubble flags, Megatron runs {stock}: {least}{stock_ms:,.1f} ms; {own.name} takes {than}."


def _stock(options: argparse.Namespace, job: Sequence[str], costs: Figures) -> Timeline:
    """Megatron's own schedule for the same job.

    Raises:
        UserError: the job does not run under it.
    """
    args = _without_our_flags(options, job)
    figures = costs if options.costs is not None else _estimated(options, args)  # a file may be a pipe
    schedule = stock_schedule(args, costs.num_ranks, costs.num_microbatches)
    return timeline_of(schedule, *figures.on(schedule.placement))


def _without_our_flags(options: argparse.Namespace, job: Sequence[str]) -> argparse.Namespace:
    """The checked flags of the same job under Megatron's own schedule."""
    from megatron.zero_bubble.planning.job.arguments.checks import check
    from megatron.zero_bubble.planning.job.arguments.parser import expanded, parse

    world_size = options.nodes * options.gpus_per_node
    given, others = given_in(modernize(job)[0] if options.megatron_lm else expanded(job))
    if options.megatron_lm:
        return checked_megatron_job(others, world_size, options.gpus_per_node).args
    args = parse(others)
    args.run = RunOptions(observations=Observations(device=given.get("device", Observations().device)))
    check(args, world_size, options.gpus_per_node)
    return args


def _estimated(options: argparse.Namespace, args: argparse.Namespace) -> Figures:
    return job_costs(options, args, None).whole

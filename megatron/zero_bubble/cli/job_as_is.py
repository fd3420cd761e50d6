"""A job as its flags describe it: where it runs, what it costs there, and its plan."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.zero_bubble.cli.advice_text import Batch
from megatron.zero_bubble.cli.gpu_memory import RESERVED, memory_of
from megatron.zero_bubble.cli.hardware import add_hardware, device_of, job_costs
from megatron.zero_bubble.cli.job_schedule import planned_schedule
from megatron.zero_bubble.cli.megatron_job import MegatronJob, ParsedJob, parsed_megatron_job, suspects
from megatron.zero_bubble.cli.rank_groups import RankGroups, checked_world_size
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs.units import positive_figure
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.planning.change import Today, need_of
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.job.kept import linear_precision

_STEPS, _CLOSE = 12, 1e-4
"""At most so many steps bring estimates to a measured time; transfers, which are not scaled, need more than one."""


def add_job_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags that say where a job runs, and what it costs there or takes as it is."""
    left = "memory of a GPU, of which a tenth is left for CUDA, NCCL and fragmentation (default: that of --gpu)"
    add_hardware(verb, left)
    verb.add_argument(
        "--measured-ms",
        type=float,
        metavar="MS",
        help="time of an iteration in the log of a run of the job: estimated passes are scaled so that the job as it "
        "is takes that long",
    )


class JobAsIs(NamedTuple):
    """A job as its flags describe it.

    Attributes:
        parsed, read: its flags, and these checked.
        today: its plan, costs and memory.
        costs: those of changes, with a whole vocabulary.
        objective: the length that its optimizer step waits for.
        batch: its batch.
        groups: its ranks.
    """

    parsed: ParsedJob
    read: MegatronJob
    today: Today
    costs: Figures
    objective: Metric
    batch: Batch
    groups: RankGroups

    def noting(self, note: str) -> JobAsIs:
        """The same with one more note on its costs."""
        costs = replace(self.today.costs, notes=(*self.today.costs.notes, note))
        return self._replace(today=self.today._replace(costs=costs))

    @property
    def replicas(self) -> int:
        """The ranks that have the same weights, over which they can be sharded."""
        return self.groups.sizes["data"] * self.groups.sizes["context"]


def read_job(options: argparse.Namespace, argv: Sequence[str]) -> JobAsIs:
    """Check the job, and plan it as it is.

    Args:
        options: the flags of ``add_job_flags``.
        argv: the flags of the job.

    Raises:
        UserError: the error that the job itself would stop with, a job without a pipeline, or bad options.
    """
    parsed = parsed_megatron_job(argv, *_sizes(options))
    read = parsed.checked()
    args = read.args
    if args.pipeline_model_parallel_size < 2:
        raise UserError(
            "advice is about pipelines of 2 or more ranks; got --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size}; a job without a pipeline has no bubble"
            f"{suspects(parsed.unread)}"
        )
    costs, own, groups = job_costs(options, args, options.costs)
    schedule = planned_schedule(args, own, costs.num_microbatches)
    timeline = timeline_of(schedule, *own.on(args.placement))
    objective: Metric = args.run.setup.objective
    tokens, peak = args.batch_sizes.final * args.seq_length, device_of(options).peak(linear_precision(args))
    batch = Batch(tokens, groups.num_ranks, args.data_parallel_size, costs.operations, peak)
    return JobAsIs(parsed, read, Today(timeline, own, need_of(timeline, own)), costs, objective, batch, groups)


def paced(options: argparse.Namespace, argv: Sequence[str]) -> argparse.Namespace:
    """Return the options with the pace of the GPU at which the job takes ``--measured-ms``, if that is given.

    Raises:
        UserError: as ``read_job``, or for a time that no pace gives.
    """
    if (measured := options.measured_ms) is None:
        return options
    positive_figure("--measured-ms", measured)
    if options.costs is not None:
        raise UserError("--measured-ms scales estimates, and --costs has times of a run; leave one of them out")
    pace = 1.0
    for _ in range(_STEPS):
        own = argparse.Namespace(**{**vars(options), "pace": pace})
        ms = read_job(own, argv).today.timeline.makespan_ms
        if math.isclose(ms, measured, rel_tol=_CLOSE):
            return own
        pace *= measured / ms
    raise UserError(
        f"--measured-ms must be the time of an iteration of this job in ms; got {measured:g}, and its passes, scaled "
        f"to that, with its transfers take {ms:,.1f}; correct it, or give --costs of a run"
    )


def capacity_of(options: argparse.Namespace, today: Today) -> float | None:
    """What a plan may take: the memory of a GPU but for what is reserved, or as much as the job takes today."""
    if not today.costs.in_bytes or not today.costs.knows_weights:
        return None
    return max((1 - RESERVED) * memory_of(options), today.need.most)


def _sizes(options: argparse.Namespace) -> tuple[int, int]:
    return checked_world_size(options.nodes, options.gpus_per_node), options.gpus_per_node

"""A job as its flags describe it: where it runs, what it costs there, and its plan."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.zero_bubble.cli.advice_text import Batch
from megatron.zero_bubble.cli.gpu_memory import RESERVED, memory_of
from megatron.zero_bubble.cli.job_figures import CostsInput, job_figures, with_vocabulary
from megatron.zero_bubble.cli.job_schedule import planned_schedule
from megatron.zero_bubble.cli.links import add_link_flags, given_links, links_of, with_transfers
from megatron.zero_bubble.cli.machine import ASSUMED
from megatron.zero_bubble.cli.megatron_job import MegatronJob, ParsedJob, parsed_megatron_job
from megatron.zero_bubble.cli.rank_groups import RankGroups, checked_world_size
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout import job_layers
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.planning.change import Today, need_of
from megatron.zero_bubble.planning.figures import Figures


def add_job_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags that say where a job runs, and what it costs there."""
    verb.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    verb.add_argument("--gpus-per-node", type=int, default=8, metavar="G", help="GPUs per node (default: 8)")
    verb.add_argument(
        "--gpu",
        type=str.lower,
        choices=tuple(DEVICES),
        default=ASSUMED,
        help=f"GPU to estimate for (default: {ASSUMED})",
    )
    verb.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="memory of a GPU, of which a tenth is left for CUDA, NCCL and fragmentation (default: that of --gpu)",
    )
    verb.add_argument(
        "--costs",
        type=CostsInput,
        metavar="FILE",
        help="pass times and memory that a run of the job has measured, instead of estimates",
    )
    add_link_flags(verb)


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
        )
    costs = job_figures(args, job_layers(args), options.gpu, options.costs, links_of(options, options.gpus_per_node))
    estimated = options.costs is None and costs.on(args.placement)[0].comm_ms > 0
    groups = RankGroups.of(args, options.nodes, options.gpus_per_node)
    costs = with_transfers(costs, groups, options.gpu, given_links(options), estimated)
    own = with_vocabulary(costs, args)
    schedule = planned_schedule(args, own, costs.num_microbatches)
    timeline = timeline_of(schedule, *own.on(args.placement))
    objective: Metric = args.run.setup.objective
    batch = Batch(args.batch_sizes.final * args.seq_length, groups.num_ranks, args.data_parallel_size)
    return JobAsIs(parsed, read, Today(timeline, own, need_of(timeline, own)), costs, objective, batch, groups)


def capacity_of(options: argparse.Namespace, today: Today) -> float | None:
    """What a plan may take: the memory of a GPU but for what is reserved, or as much as the job takes today."""
    if not today.costs.in_bytes or not today.costs.knows_weights:
        return None
    return max((1 - RESERVED) * memory_of(options), today.need.most)


def _sizes(options: argparse.Namespace) -> tuple[int, int]:
    return checked_world_size(options.nodes, options.gpus_per_node), options.gpus_per_node

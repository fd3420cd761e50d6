"""What the GPUs of a job can run: asked by the dry run, by every row of advice, and by ``auto``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.core.ir.queues import HardwareQueues
from megatron.zero_bubble.engine.runtime.backends import QUEUES, hardware_queues, is_nccl
from megatron.zero_bubble.planning.feasibility import Feasibility
from megatron.zero_bubble.planning.few import few
from megatron.zero_bubble.planning.job.proved import check_counts

SEVERAL = f"{QUEUES}=32"
"""What a job is started with so that its streams do not share hardware queues."""
_MOST_PROVED = 8
"""Batch sizes of a ramp that are proved before a run; the run proves all before it trains."""
_BLACKWELL = 10
"""The compute capability from which on Megatron-LM takes several hardware queues."""


def job_runs(
    args: argparse.Namespace, gpu: str, under_megatron: bool, environment: Mapping[str, str] = os.environ
) -> Feasibility:
    """What a job has for its plans.

    Args:
        args: its checked flags.
        gpu: the name of its GPU.
        under_megatron: whether Megatron-LM's script starts it.
        environment: of its processes.
    """
    own = args.zero_bubble.runs if args.run.has_schedule else Feasibility()
    queues = job_queues(args, gpu, under_megatron, environment) if _uses_nccl(args) else None
    return replace(own, queues=queues, num_multiprocessors=DEVICES[gpu].multiprocessors)


def job_queues(
    args: argparse.Namespace, gpu: str, under_megatron: bool, environment: Mapping[str, str]
) -> HardwareQueues:
    """The hardware queues of a job: those of its environment, unless Megatron-LM starts with a single one only."""
    divides_layers = args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1
    if under_megatron and divides_layers and DEVICES[gpu].capability < _BLACKWELL:
        why = f"Megatron-LM wants {QUEUES}=1 with tensor or context parallelism on GPUs before Blackwell"
        return HardwareQueues(1, "one hardware queue per GPU", why, None)
    return hardware_queues(environment)


def with_more_queues(runs: Feasibility) -> Feasibility | None:
    """The same with ``SEVERAL``; None where a job cannot choose that, or has as many."""
    if runs.queues is None or runs.queues.several != "32" or runs.queues.number >= 32:
        return None
    name, _, value = SEVERAL.partition("=")
    return replace(runs, queues=hardware_queues({name: value}))


def batch_counts(args: argparse.Namespace) -> list[int]:
    """All numbers of microbatches of a job."""
    return sorted({size // args.batch_sizes.granule for size in args.batch_sizes.steps})


class ProvedPlans(NamedTuple):
    """The plans of a job that were proved.

    Attributes:
        counts: the numbers of microbatches for which they stand.
        plans: by number of microbatches.
    """

    counts: list[int]
    plans: dict[int, Plan]


def check_job(args: argparse.Namespace, runs: Feasibility, by_few: bool = False) -> ProvedPlans:
    """Prove the plans of a job as its run does: for all its numbers of microbatches, or of very many for some that are
    evenly spread. With ``zb-auto``, they are the plans that it begins with.

    Args:
        by_few: whether few microbatches stand for many.

    Raises:
        UserError: why one cannot run.
    """
    counts, num_ranks = _spread(batch_counts(args)), args.pipeline_model_parallel_size
    proved = sorted({few(num_ranks, count) for count in counts}) if by_few else counts
    return ProvedPlans(counts, check_counts(args.zero_bubble, args.source, num_ranks, proved, runs))


def _spread(counts: list[int]) -> list[int]:
    """At most ``_MOST_PROVED`` of ``counts``, with the first and the last."""
    if len(counts) <= _MOST_PROVED:
        return counts
    return [counts[place * (len(counts) - 1) // (_MOST_PROVED - 1)] for place in range(_MOST_PROVED)]


def _uses_nccl(args: argparse.Namespace) -> bool:
    """Whether the run uses NCCL, assuming that device ``auto`` finds GPUs."""
    if args.distributed_backend is not None:
        return is_nccl(args.distributed_backend)
    return bool(args.run.observations.device != "cpu")

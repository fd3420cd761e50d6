"""Where the stages of a job are, as its flags say."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.job.config import ZeroBubbleConfig
from megatron.zero_bubble.job.flags import config_of, records
from megatron.zero_bubble.job.hybrid import check_stages_of_pattern
from megatron.zero_bubble.job.layout import take_layout
from megatron.zero_bubble.job.runnable import check_placement
from megatron.zero_bubble.planning.source import ScheduleSource


def place_stages(
    options: argparse.Namespace, job: Any, num_chunks: int | None, peer_timeout_s: float
) -> tuple[ZeroBubbleConfig, ScheduleSource]:
    """The configuration of the flags and its source of schedules, with a placement that Megatron supports.

    The job gets the layout of its plan file, if that has one.

    Args:
        options: the parsed ``--zero-bubble-*`` flags.
        job: the job's flags; only those of the pipeline and its layers are read.
        num_chunks: stages per rank, if the job defines it.

    Raises:
        UserError: no pipeline, flags that exclude each other, a number of stages per rank that the schedule does not
            support, or another layout than the plan file's.
    """
    ranks = job.pipeline_model_parallel_size
    if ranks < 2:
        raise UserError(
            "a zero-bubble schedule needs a pipeline of 2 or more ranks, got --pipeline-model-parallel-size "
            f"{ranks}; raise it or drop the schedule"
        )
    config = config_of(options, measure_memory=records(options), peer_timeout_s=peer_timeout_s)
    if config.takes_chunks:
        config = replace(config, num_chunks=num_chunks)
    source = config.sources()(ranks)
    placement = source.placement
    check_placement(placement, ranks)
    chunks = placement.num_stages // ranks
    check_stages_of_pattern(job, placement)
    if num_chunks not in (None, chunks):
        raise UserError(
            f"the schedule has {chunks} stage{'s' * (chunks > 1)} per rank, the job {num_chunks}; drop "
            "--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank or "
            "--pipeline-model-parallel-layout"
        )
    if chunks > 1 and not getattr(job, "overlap_p2p_comm", True):  # else Megatron ignores it
        raise UserError(
            "--no-overlap-p2p-communication does not work with a zero-bubble schedule, whose messages always overlap "
            "with passes; drop the flag or the schedule"
        )
    if config.plan is not None:
        take_layout(job, config.plan, source.name)
    return config, source

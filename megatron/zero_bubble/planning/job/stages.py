"""Where the stages of a job are, as its flags say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout_string import read_layout, with_stages
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.hybrid import check_stages_of_pattern
from megatron.zero_bubble.planning.job.layout import take_layout
from megatron.zero_bubble.planning.job.runnable import check_placement, is_megatrons_own
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.source import ZB_AUTO, ScheduleSource


def place_stages(
    run: RunOptions, job: Any, num_chunks: int | None, peer_timeout_s: float
) -> tuple[ZeroBubbleConfig, ScheduleSource]:
    """The configuration of the flags and its source of schedules, with a placement that Megatron supports.

    The job gets the layout of its plan file, if that has one.

    Args:
        run: what the flags ask for.
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
    config = ZeroBubbleConfig.of(run, run.observations.records, peer_timeout_s)
    source = config.sources()(ranks)
    layout = getattr(job, "pipeline_model_parallel_layout", None)
    if layout is not None:
        _check_layout(layout, source.placement, config.takes_chunks)
    check_stages_of_pattern(job, source.placement, config.takes_chunks)
    if config.takes_chunks and num_chunks is not None:
        if config.num_chunks not in (None, num_chunks):
            raise UserError(
                f"--zero-bubble-num-chunks must be the stages per rank of the job, {num_chunks}; got "
                f"{config.num_chunks}; leave it out"
            )
        config = replace(config, num_chunks=num_chunks)
        source = config.sources()(ranks)
    placement = source.placement
    check_placement(placement, ranks)
    chunks = placement.num_stages // ranks
    if source.overlaps and chunks < 2:
        raise UserError(
            "a job hides the all-to-all of experts only with 2 or more stages per rank, because megatron-core plans "
            f"the layers of no other pipeline; got schedule {source.name} with one; give interleaved-1f1b, dualpipe-v "
            "or zb-v"
        )
    if num_chunks not in (None, chunks):
        raise UserError(
            f"the schedule has {chunks} stage{'s' * (chunks > 1)} per rank, the job {num_chunks}; drop "
            "--num-layers-per-virtual-pipeline-stage or --num-virtual-stages-per-pipeline-rank"
            + (", or give --zero-bubble-placement loop" if config.setup.name == ZB_AUTO else "")
        )
    if chunks > 1 and not getattr(job, "overlap_p2p_comm", True):  # else Megatron ignores it
        raise UserError(
            "--no-overlap-p2p-communication does not work with a zero-bubble schedule, whose messages always overlap "
            "with passes; drop the flag or the schedule"
        )
    if config.setup.plan is not None:
        take_layout(job, config.setup.plan, source.name)
    return config, source


def _check_layout(layout: str, placement: Placement, takes_chunks: bool) -> None:
    """Reject a layout with another number of stages per rank than the schedule's, and write the layout that fits.

    Args:
        placement: the schedule's, without a number of stages per rank from the job.
        takes_chunks: whether the schedule is selected by name; an interleaved one then takes any number above 1.
    """
    ranks, has = placement.num_ranks, placement.num_stages // placement.num_ranks
    given, rest = divmod(len(read_layout(layout)), ranks)
    is_interleaved = takes_chunks and has > 1 and is_megatrons_own(placement)
    if rest or given == has or (is_interleaved and given > 1):
        return
    raise UserError(
        f"the schedule has {has} stage{'s' * (has > 1)} per rank, the layout of the job {given}; give a layout of "
        f"{placement.num_stages} stages: --pipeline-model-parallel-layout "
        f"'{with_stages(layout, placement.num_stages, ranks)}'"
    )

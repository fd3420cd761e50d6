"""Run an unmodified Megatron-LM job under a zero-bubble schedule: patch its flags, process groups and model building.

``install`` is called before the job parses its flags. The schedule is enabled when Megatron has validated the flags,
before any process group or model exists.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megatron.core

from megatron.zero_bubble.core.errors import PatchError
from megatron.zero_bubble.core.formats.layout import embedding_stages
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.runtime.backends import is_nccl, queues_of_job
from megatron.zero_bubble.integration.adapter.placement import grouping_ends
from megatron.zero_bubble.integration.megatron_lm import checks as job_checks
from megatron.zero_bubble.integration.megatron_lm.batches import in_training, num_microbatches
from megatron.zero_bubble.integration.megatron_lm.bubble import JobBubble
from megatron.zero_bubble.integration.megatron_lm.builder import Builder, built_as_placed
from megatron.zero_bubble.integration.megatron_lm.data import check_data
from megatron.zero_bubble.integration.megatron_lm.meeting import Meeting
from megatron.zero_bubble.integration.megatron_lm.of_version import check_loading, has_ramps
from megatron.zero_bubble.integration.megatron_lm.post_validation import JobSteps, barriers
from megatron.zero_bubble.integration.megatron_lm.shards import JobShards, reads_weights
from megatron.zero_bubble.integration.megatron_lm.trace import JobTrace
from megatron.zero_bubble.integration.patching import used
from megatron.zero_bubble.integration.patching.apply import apply as apply_schedule
from megatron.zero_bubble.integration.patching.apply import report as report_schedule
from megatron.zero_bubble.integration.patching.apply import revert as revert_schedule
from megatron.zero_bubble.integration.patching.replaced import Replaced, Replacement
from megatron.zero_bubble.integration.patching.seams import Seams, installed_seams
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.facts import facts_of, gpu_kind, remarks_at_start
from megatron.zero_bubble.planning.job.flags import add_flags
from megatron.zero_bubble.planning.job.installed import check_packages
from megatron.zero_bubble.planning.job.pattern import pattern_of
from megatron.zero_bubble.planning.job.post_validation import forecast
from megatron.zero_bubble.planning.job.proved import check_counts
from megatron.zero_bubble.planning.job.runnable import is_megatrons_own
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.source import ScheduleSource

_job = Replaced()
_placed = Replaced()  # names that are replaced once the job's flags are known


def install(run: RunOptions, say: Callable[[str], None] = print, joined: Callable[[], None] = lambda: None) -> None:
    """Patch a job that has not parsed its flags yet.

    Args:
        run: what our flags on the job's command line ask for.
        say: prints the line that lists the replaced names, on rank 0.
        joined: with a schedule, called on every rank when the ranks have joined and have no other groups yet.

    Raises:
        SeamError: Megatron-LM has an unsupported version, or a name in it is not as expected.
        PatchError: ``install`` was already called.
    """
    if _job:
        raise PatchError("install() was already called in this process; call revert() first")
    seams = installed_seams()
    replacements: list[Replacement] = [(seams.flags, _with_our_flags)]
    if run.has_schedule:
        # Check the names that are replaced later as well, so that a job is rejected before it starts or not at all.
        for seam in (
            seams.schedule,
            seams.schedule_of_chunks,
            seams.linear,
            seams.process_groups,
            *seams.models,
            seams.data,
        ):
            seam.resolve()
        meeting = Meeting()
        replacements.insert(0, (seams.process_groups, lambda initialize: _once_joined(initialize, joined, meeting)))
        used.look_up((*used.DATA, *(used.BUBBLE if run.observations.log_bubble else ())))
        if run.setup.validates:
            used.look_up(used.LATE_LINES)
            for seam in seams.loop.all:
                seam.resolve()
        if run.setup.shards is not None:
            for seam in seams.readers.all:
                seam.resolve()
        replacements.append((seams.validated_flags, lambda validate: _validated(validate, run, seams, say, meeting)))
    _job.replace(replacements)


def revert() -> None:
    """Restore all names of the job and of megatron-core."""
    _withdraw()
    _job.revert()


def in_force() -> bool:
    """Whether the job has validated its flags, so that the schedule is enabled."""
    return bool(report_schedule())


def _withdraw() -> None:
    _placed.revert()
    revert_schedule()


def report() -> list[str]:
    return [*_job.report(), *_placed.report(), *report_schedule()]


def _with_our_flags(add_megatron_arguments: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add_megatron_arguments)
    def add_arguments(parser: Any) -> Any:
        parser = add_megatron_arguments(parser)
        add_flags(parser)
        return parser

    return add_arguments


def _validated(
    validate_args: Callable[..., Any],
    run: RunOptions,
    seams: Seams,
    say: Callable[[str], None],
    meeting: Meeting,
) -> Callable[..., Any]:
    @functools.wraps(validate_args)
    def validate(args: Any, *defaults: Any, **more_defaults: Any) -> Any:
        job_checks.check_script(vars(sys.modules["__main__"]))
        config, source, switched_off = job_checks.configure(args, run)
        validated = validate_args(args, *defaults, **more_defaults)
        job_checks.check(args, run, source, num_microbatches(args, has_ramps()))
        _check_plans(args, config, source, run.observations.device)
        check_packages(args)
        check_loading(args, source.placement)
        if config.host_memory is not None:
            node_size = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
            job_checks.check_offload(args, config, source, max(in_training(args, has_ramps())), node_size)
        with meeting.reporting():
            check_data(args)
        bubble = JobBubble(args) if run.observations.log_bubble else None
        trace = JobTrace(run, args, say) if run.observations.records else None
        if trace is not None and args.rank == 0:
            with meeting.reporting():
                trace.make_folders()
        _put_in_force(config, source, seams, say, bubble, trace, args)
        for line in switched_off:
            say(line)
        return validated

    return validate


def _check_plans(args: Any, config: ZeroBubbleConfig, source: ScheduleSource, device: str) -> None:
    """Prove the plans of all batch sizes where there are several: a later one would end the job when it begins."""
    counts = sorted(set(num_microbatches(args, has_ramps())))
    own = select(device).backend
    divides = any(getattr(args, f"{name}_parallel_size", 1) > 1 for name in ("tensor_model", "context"))
    queues = queues_of_job(args.distributed_backend if is_nccl(own) else own, divides)
    if queues is not None and len(counts) > 1:
        runs = replace(config.runs, queues=queues)
        check_counts(config, source, args.pipeline_model_parallel_size, counts, runs)


def _put_in_force(
    config: ZeroBubbleConfig,
    source: ScheduleSource,
    seams: Seams,
    say: Callable[[str], None],
    bubble: JobBubble | None,
    trace: JobTrace | None,
    args: Any,
) -> None:
    _withdraw()  # a job that restarts within its processes validates its flags again
    observers = (bubble, trace, None if trace is None else trace.recorder)
    pipeline = apply_schedule(config, [observer for observer in observers if observer is not None], say, source)
    if trace is not None:
        trace.pipeline = pipeline
    placement = source.placement
    divides_vocabulary = source.setup.vocabulary is not None
    builder = Builder(placement, divides_vocabulary)
    models = [(seam, builder.building) for seam in seams.models]
    if config.setup.validates:
        _placed.replace(JobSteps(pipeline, args, say).replacements(seams.loop))
    exchanges = config.setup.exchanges  # then chunks are whole between iterations
    readers = reads_weights(args) if pipeline.units is not None and not exchanges else []
    if pipeline.units is not None and not (readers or exchanges):
        _placed.replace(JobShards(pipeline.units, args).replacements(seams.readers))
    if is_megatrons_own(placement):
        _placed.replace(models if divides_vocabulary or builder.divides_ranks else [])
    else:
        with_embedding = embedding_stages(args, placement.num_stages)
        replacements: list[Replacement] = [
            (seams.process_groups, lambda original: grouping_ends(original, lambda _: placement, with_embedding)),
            (seams.data, lambda build: built_as_placed(build, placement)),
            *models,
        ]
        if seams.pipeline_group is not None:
            replacements.append((seams.pipeline_group, builder.asked_for_group))
        _placed.replace(replacements)
    taken = ", ".join(dict.fromkeys(line.partition(":")[0].removeprefix("megatron.") for line in report()))
    say(f"schedule {source.name} in megatron-core {megatron.core.__version__}, in place of {taken}")
    pattern = pattern_of(args)
    if layout := getattr(args, "pipeline_model_parallel_layout", None):
        say(f"layers by stage: {layout}")
    elif pattern is not None and len(pattern.stages) > 1:
        say(f"layers by stage: {pattern.text}")
    sentences = remarks_at_start(
        args, source, in_training(args)[-1], config, lambda: facts_of(args, gpu_kind(select("auto").device_name()))
    )
    for sentence in sentences:
        say(sentence)
    if readers:
        say(f"sharded units save less memory, because weights stay whole between iterations: {', '.join(readers)}")
    if config.setup.validates:
        say(forecast(source, in_training(args, has_ramps())[-1]))
        if waits := barriers(args, placement.stage_to_rank[0] == placement.stage_to_rank[-1]):
            say(f"post-validation gains less, because ranks wait for each other in every iteration: {', '.join(waits)}")


def _once_joined(initialize: Callable[..., None], joined: Callable[[], None], meeting: Meeting) -> Callable[..., None]:
    @functools.wraps(initialize)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        joined()
        meeting.hold()
        initialize(*args, **kwargs)

    return initialize_model_parallel

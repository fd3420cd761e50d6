"""Enable the zero-bubble schedule of a training run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron.zero_bubble.core.errors import PatchError, SeamError, UserError

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer

    from megatron.zero_bubble.engine.optimizer.post_validation import PostValidatedOptimizer
    from megatron.zero_bubble.engine.runtime.observer import IterationObserver
    from megatron.zero_bubble.integration.adapter.pipeline import Pipeline


class ScheduleInUse(NamedTuple):
    """The schedule in use: its description for the start-up line, and our pipeline, None under Megatron's schedule."""

    phrase: str
    pipeline: Pipeline | None


def apply_schedule(args: argparse.Namespace, observers: Sequence[IterationObserver] = ()) -> ScheduleInUse:
    """Enable the schedule that the flags select, before the model is built; by default, keep Megatron's schedule.

    A collective call: an error on one rank is raised on all ranks.

    Args:
        observers: notified of the passes of training iterations, also under Megatron's own 1F1B.

    Raises:
        UserError: the schedule does not exist, does not fit the layout, or this megatron-core is not supported.
    """
    from pretrain.distributed import agree

    if not args.run.has_schedule:
        if observers:
            from megatron.zero_bubble.integration.patching import observe

            observe(observers)
        return ScheduleInUse("Megatron's own schedule", None)
    problem = pipeline = None
    try:
        from megatron.zero_bubble.integration.patching import apply

        pipeline = apply(args.zero_bubble, observers, source=args.source)
    except (UserError, PatchError, SeamError) as error:
        problem = str(error)
    agree(problem)
    return ScheduleInUse(f"schedule {args.source.name}, W {_wgrad_words(args)}", pipeline)


def _wgrad_words(args: argparse.Namespace) -> str:
    from megatron.zero_bubble.engine import kernels, platforms

    if args.zero_bubble.setup.exact:
        return "computed as in megatron-core"
    return f"fused, {kernels.select(platforms.select(args.run.observations.device).name).words}"


def step_ahead(
    args: argparse.Namespace,
    pipeline: Pipeline | None,
    optimizer: MegatronOptimizer,
    chunks: list[DistributedDataParallel],
) -> MegatronOptimizer | PostValidatedOptimizer:
    """Wrap ``optimizer`` so that ``pipeline`` validates its steps; without post-validation, return it unchanged.

    With sharded units, the optimizer steps shards.
    """
    if pipeline is not None and pipeline.units is not None:
        pipeline.units.step_shards(optimizer)
    if pipeline is None or not args.zero_bubble.post_validation:
        return optimizer
    return pipeline.post_validated(optimizer, chunks)

"""The one place where a training run asks for a zero-bubble schedule."""

from __future__ import annotations

import argparse

from megatron.zero_bubble.training.errors import UsageError


def apply_schedule(args: argparse.Namespace) -> str:
    """Put the schedule of the flags in force, before the model is built; without one, change nothing.

    Returns:
        a phrase for the start-up line.

    Raises:
        UsageError: the schedule does not exist, does not fit the layout, or this megatron-core is not supported.
    """
    if args.zero_bubble_schedule is None and args.zero_bubble_schedule_file is None:
        return "Megatron's own schedule"
    from megatron.zero_bubble.config import ZeroBubbleConfig
    from megatron.zero_bubble.patching import apply

    try:
        apply(
            ZeroBubbleConfig(
                schedule=args.zero_bubble_schedule,
                schedule_file=args.zero_bubble_schedule_file,
                peer_timeout_s=args.distributed_timeout_minutes * 60,
            )
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return f"schedule {args.zero_bubble_schedule or args.zero_bubble_schedule_file}"

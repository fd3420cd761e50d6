"""Options of Megatron that ask for what a schedule of this package does by itself.

They are switched off before the model is built, because Megatron would leave what they ask for to its own schedules:
weight gradients that its linears delay, for example, would wait for a call that never comes.
"""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.planning.job.options import flag_of

FULFILLED = {
    "delay_wgrad_compute": "the schedule delays all weight gradients itself, to W",
    "overlap_dispatch_backward_with_experts_wgrad": "the schedule decides where the weight gradients of experts run",
    "overlap_p2p_comm_warmup_flush": "the schedule overlaps messages with passes in all of its phases",
}
"""By option, what the schedule does in its place."""


def fulfill(options: Any) -> list[str]:
    """Switch off the options in ``FULFILLED`` that are on, and return one line for each.

    Args:
        options: the flags of a job, or a configuration of a model or of data parallelism.
    """
    enabled = [name for name in FULFILLED if getattr(options, name, False)]
    for name in enabled:
        setattr(options, name, False)
    return [f"{flag_of(name)} is switched off: {FULFILLED[name]}" for name in enabled]

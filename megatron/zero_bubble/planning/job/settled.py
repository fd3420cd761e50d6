"""The options of Megatron, settled before a job starts: the one check of every entrance.

Jobs of Megatron-LM have their options in their flags, runs of Megatron-Bridge and loops of one's own in the
configurations of the model, of data parallelism and of the optimizer. All of them are held against the rows of
``exclusions.OPTIONS``, which refuse an option, or switch it off. Those that are switched off ask for what the schedule
does by itself, and Megatron would leave it to its own schedules: weight gradients that its linears delay, for example,
would wait for a call that never comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.zero_bubble.planning.exclusions import OPTIONS
from megatron.zero_bubble.planning.job.options import check_options, flag_of
from megatron.zero_bubble.planning.run_options import RunOptions


def settle_options(parts: Sequence[Any], run: RunOptions, megatrons_own: bool = True) -> list[str]:
    """Switch off the options that a schedule makes needless, and reject those that it does not support.

    Args:
        parts: what has the options: the flags of a job, or its configurations, that of the model first.
        run, megatrons_own: as for ``check_options``.

    Returns:
        one line per option that was on.

    Raises:
        UserError: as ``check_options``.
    """
    needless = [rule for rule in OPTIONS if rule.is_set and rule.choice.is_made(run)]
    enabled = [rule for rule in needless if any(rule.sentence(options) for options in parts)]
    for rule in enabled:
        for options in parts:
            if hasattr(options, rule.option):
                setattr(options, rule.option, rule.value)
    for number, options in enumerate(parts):
        check_options(options, run, megatrons_own, of_model=number == 0)
    return [f"{flag_of(rule.option)} is switched off: {rule.why}" for rule in enabled]

"""The table of the authors' fork's flags: what the launcher makes of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.integration.megatron_lm.fork_flags import build_parser, modernize
from site_parts.markdown import code, table

_SIZE = "--pipeline-model-parallel-size"
_JOBS = (
    "--enable-zero-bubble",
    f"--enable-zero-bubble --zero-bubble-max-pending-backward 16 {_SIZE} 8",
    "--zero-bubble-v-schedule",
    "--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup half",
    "--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup min",
    "--enable-optimizer-post-validation",
    "--enable-optimizer-post-validation --enable-exactly-numeric-match",
)
"""Flags that are translated, with those without which they have no effect."""


def fork() -> str:
    """What the launcher makes of every flag of the fork."""
    shown = {word for job in _JOBS for word in job.split()}
    others = [action for action in build_parser()._actions if action.option_strings[0] not in shown]
    jobs = [*_JOBS, *(f"{action.option_strings[0]}{'' if action.nargs == 0 else ' 1'}" for action in others)]
    return table(("the fork's", "here"), [(code(job), _becomes(job.split())) for job in jobs])


def _becomes(job: Sequence[str]) -> str:
    try:
        arguments, said = modernize(job)
    except UserError as error:
        return f"refused: {str(error).partition('; ')[2]}"
    ours = [word for word in arguments if word not in job]
    return code(" ".join(ours)) if ours else f"dropped: {said[-1].partition(': ')[2]}"


PARTS: dict[str, Callable[[], str]] = {"flags-fork": fork}

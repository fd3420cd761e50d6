"""The flags of the authors' fork of Megatron-LM (sail-sg/zero-bubble-pipeline-parallelism), in today's spelling."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.job.flags import StrictParser
from megatron.zero_bubble.job.source import AUTO

_POST_VALIDATION, _EXACT = "--enable-optimizer-post-validation", "--enable-exactly-numeric-match"
_RENAMED = {
    _POST_VALIDATION: ["--zero-bubble-post-validation"],
    _EXACT: ["--zero-bubble-rollback", "exact"],
}
_NEEDLESS = {
    "--allow-padding-num-layers": "stages get a balanced layout where layers do not divide evenly",
    "--enable-zb-runtime": "every schedule runs on one runtime",
    "--no-pre-communication-optimization": "no message goes ahead of another",
}
_NEEDLESS_WITH_VALUE = {
    "--zero-bubble-pipeline-timers-start-iter": "zb-auto measures from its third iteration",
    "--zero-bubble-pipeline-timers-end-iter": "zb-auto measures for four iterations",
    "--profile-memory-iter": "zero-bubble plan shows memory",
}
_REFUSED_SWITCHES = {
    "--enable-1f1b-v": "give --zero-bubble-schedule v-half",
    "--auto-offload-time": "drop it: activations are not offloaded here",
    "--offload-overlap-sr": "drop it: activations are not offloaded here",
}
_REFUSED = {
    "--zero-bubble-adaptive-memory-limit-percentile": "give --zero-bubble-memory-limit, 60GiB for example",
    "--num-seq-splits": "drop it: sequences are not split here",
    "--interleave-group-size": "drop it, or give --zero-bubble-schedule interleaved-1f1b or breadth-first",
    "--offload-chunk-num": "drop it: activations are not offloaded here",
    "--offload-time": "drop it: activations are not offloaded here",
}
_V_SCHEDULES = {"min": "v-min", "half": "v-half", "zb": "zb-v"}
_PIPELINE = "--pipeline-model-parallel-size"


def modernize(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Rewrite the flags of the fork.

    Returns:
        the arguments with today's flags, and a line for each flag that was rewritten or dropped.

    Raises:
        UserError: a flag of the fork without an equal, or its choice of a schedule beside ours.
    """
    old, others = _parser().parse_known_args(list(arguments))
    for flag, remedy in (_REFUSED | _REFUSED_SWITCHES).items():
        if _given(old, flag):
            raise UserError(f"{flag} of the authors' fork has no equal here; {remedy}")
    said: list[str] = []
    rewritten = _schedule(old, said)
    if rewritten and any(argument.startswith("--zero-bubble-schedule") for argument in others):
        raise UserError("--zero-bubble-schedule replaces the fork's flags for it; got both; drop the fork's")
    for flag, flags in _RENAMED.items():
        if flag == _EXACT and _given(old, flag) and not _given(old, _POST_VALIDATION):
            said.append(f"{flag} is dropped: it says nothing without {_POST_VALIDATION}")
        elif _given(old, flag):
            said.append(f"{flag} is {' '.join(flags)} now")
            rewritten += flags
    for flag, why in (_NEEDLESS | _NEEDLESS_WITH_VALUE).items():
        if _given(old, flag):
            said.append(f"{flag} is not needed any more: {why}")
    if old.pipeline_model_parallel_size is not None:
        others += [_PIPELINE, str(old.pipeline_model_parallel_size)]
    return (others + rewritten, said) if said else (list(arguments), said)


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(add_help=False, allow_abbrev=False)
    switches = ("--enable-zero-bubble", "--zero-bubble-v-schedule", *_RENAMED, *_NEEDLESS, *_REFUSED_SWITCHES)
    for flag in switches:
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--zero-bubble-v-schedule-mem-setup", choices=tuple(_V_SCHEDULES))
    for flag in ("--zero-bubble-max-pending-backward", *_NEEDLESS_WITH_VALUE, *_REFUSED):
        parser.add_argument(flag)
    parser.add_argument(_PIPELINE, type=int)
    return parser


def _schedule(old: argparse.Namespace, said: list[str]) -> list[str]:
    """The fork's choice of a schedule in today's flags."""
    setup, pending = old.zero_bubble_v_schedule_mem_setup, old.zero_bubble_max_pending_backward
    if old.zero_bubble_v_schedule:
        flags = ["--zero-bubble-schedule", _V_SCHEDULES[setup or "zb"]]
        said.append(
            f"--zero-bubble-v-schedule{f' with memory setup {setup}' if setup else ''} is {' '.join(flags)} now"
        )
    elif old.enable_zero_bubble:
        flags = ["--zero-bubble-schedule", AUTO, "--zero-bubble-memory-limit", _limit(pending, old)]
        what = "" if pending is None else f" with --zero-bubble-max-pending-backward {pending}"
        said.append(f"--enable-zero-bubble{what} is {' '.join(flags)} now")
    else:
        flags = []
        for flag, value in (
            ("--zero-bubble-v-schedule-mem-setup", setup),
            ("--zero-bubble-max-pending-backward", pending),
        ):
            if value is not None:
                said.append(f"{flag} is dropped: it says nothing without a schedule")
    return flags


def _limit(pending: str | None, old: argparse.Namespace) -> str:
    """So many microbatches without their backward, as a multiple of the pipeline's ranks."""
    if pending in (None, "auto"):
        return "1p"
    ranks = old.pipeline_model_parallel_size
    if not pending.isdecimal() or not int(pending) or not ranks:
        raise UserError(
            f"--zero-bubble-max-pending-backward counts microbatches of a pipeline, got {pending!r} and {_PIPELINE} "
            f"{ranks}; give --zero-bubble-memory-limit 1p, 2p or in GiB"
        )
    return f"{int(pending) / ranks:.6g}p"


def _given(old: argparse.Namespace, flag: str) -> bool:
    return getattr(old, flag.lstrip("-").replace("-", "_")) not in (None, False)

"""Translate the flags of the authors' fork of Megatron-LM (sail-sg/zero-bubble-pipeline-parallelism) to ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.codecs import StrictParser
from megatron.zero_bubble.planning.source import ZB_AUTO

_POST_VALIDATION, _EXACT = "--enable-optimizer-post-validation", "--enable-exactly-numeric-match"
_RENAMED = {
    _POST_VALIDATION: ["--zero-bubble-post-validation"],
    _EXACT: ["--zero-bubble-post-validation", "exact"],
}
_NEEDLESS = {
    "--allow-padding-num-layers": "stages get a balanced layout if the layers do not divide evenly",
    "--enable-zb-runtime": "all schedules run on the same runtime",
    "--no-pre-communication-optimization": "no message is sent ahead of another",
}
_NEEDLESS_WITH_VALUE = {
    "--zero-bubble-pipeline-timers-start-iter": "zb-auto measures from its third iteration",
    "--zero-bubble-pipeline-timers-end-iter": "zb-auto measures for four iterations",
    "--profile-memory-iter": "zero-bubble plan shows the peak memory",
}
_REFUSED_SWITCHES = {
    "--enable-1f1b-v": "give --zero-bubble-schedule v-half",
    "--cpu-offload": "give --zero-bubble-offload auto",
    "--recompute-lgd": "give --recompute-granularity selective and --recompute-modules layernorm mlp",
    "--auto-offload-time": "drop it: --zero-bubble-offload needs no time",
    "--offload-overlap-sr": "drop it: --zero-bubble-offload runs all copies in order",
}
_REFUSED = {
    "--zero-bubble-adaptive-memory-limit-percentile": "give --zero-bubble-memory-limit, 60GiB for example",
    "--num-seq-splits": "give --zero-bubble-schedule seq-1f1b and --zero-bubble-slices",
    "--interleave-group-size": "drop it, or give --zero-bubble-schedule interleaved-1f1b or breadth-first",
    "--offload-chunk-num": "give --zero-bubble-offload with the share of the chunks, 50% for example",
    "--offload-time": "drop it: --zero-bubble-offload needs no time",
}
_V_SCHEDULES = {"min": "v-min", "half": "v-half", "zb": "zb-v"}
_PIPELINE = "--pipeline-model-parallel-size"


def modernize(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace the flags of the fork by ours.

    Returns:
        the arguments with our flags, and one log line per flag that was replaced or dropped.

    Raises:
        UserError: a flag of the fork has no equivalent, or both its flags and ours select a schedule.
    """
    options, others = build_parser().parse_known_args(list(arguments))
    old = vars(options)
    for flag, remedy in (_REFUSED | _REFUSED_SWITCHES).items():
        if _given(old, flag):
            raise UserError(f"{flag} of the authors' fork has no equivalent; {remedy}")
    said: list[str] = []
    rewritten = _schedule(old, said)
    if rewritten and any(argument.startswith("--zero-bubble-schedule") for argument in others):
        raise UserError("--zero-bubble-schedule replaces the fork's schedule flags; got both; drop the fork's flags")
    for flag, flags in _RENAMED.items():
        if flag == _EXACT and _given(old, flag) and not _given(old, _POST_VALIDATION):
            said.append(f"{flag} is ignored: it has no effect without {_POST_VALIDATION}")
        elif _given(old, flag):
            said.append(f"{flag} is replaced by {' '.join(flags)}")
            rewritten = [word for word in rewritten if word not in flags] + flags  # exact replaces the default
    for flag, why in (_NEEDLESS | _NEEDLESS_WITH_VALUE).items():
        if _given(old, flag):
            said.append(f"{flag} is no longer needed: {why}")
    if old["pipeline_model_parallel_size"] is not None:
        others += [_PIPELINE, str(old["pipeline_model_parallel_size"])]
    return (others + rewritten, said) if said else (list(arguments), said)


def build_parser() -> StrictParser:
    """The flags of the fork, and the size of the pipeline."""
    parser = StrictParser(add_help=False, allow_abbrev=False)
    switches = ("--enable-zero-bubble", "--zero-bubble-v-schedule", *_RENAMED, *_NEEDLESS, *_REFUSED_SWITCHES)
    for flag in switches:
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--zero-bubble-v-schedule-mem-setup", choices=tuple(_V_SCHEDULES))
    for flag in ("--zero-bubble-max-pending-backward", *_NEEDLESS_WITH_VALUE, *_REFUSED):
        parser.add_argument(flag)
    parser.add_argument(_PIPELINE, type=int)
    return parser


def _schedule(old: Mapping[str, Any], said: list[str]) -> list[str]:
    """Our flags for the schedule that the fork's flags select."""
    setup, pending = old["zero_bubble_v_schedule_mem_setup"], old["zero_bubble_max_pending_backward"]
    if old["zero_bubble_v_schedule"]:
        flags = ["--zero-bubble-schedule", _V_SCHEDULES[setup or "zb"]]
        said.append(
            f"--zero-bubble-v-schedule{f' with memory setup {setup}' if setup else ''} is replaced by {' '.join(flags)}"
        )
    elif old["enable_zero_bubble"]:
        flags = ["--zero-bubble-schedule", ZB_AUTO, "--zero-bubble-memory-limit", _limit(pending, old)]
        what = "" if pending is None else f" with --zero-bubble-max-pending-backward {pending}"
        said.append(f"--enable-zero-bubble{what} is replaced by {' '.join(flags)}")
    else:
        flags = []
        for flag, value in (
            ("--zero-bubble-v-schedule-mem-setup", setup),
            ("--zero-bubble-max-pending-backward", pending),
        ):
            if value is not None:
                said.append(f"{flag} is ignored: it has no effect without a schedule")
    return flags


def _limit(pending: str | None, old: Mapping[str, Any]) -> str:
    """Memory limit for a number of microbatches that wait for their backward, in multiples of the pipeline size."""
    if pending in (None, "auto"):
        return "1p"
    ranks = old["pipeline_model_parallel_size"]
    if not (pending.isascii() and pending.isdecimal()) or not int(pending) or not ranks:
        raise UserError(
            f"--zero-bubble-max-pending-backward must be a positive number and needs {_PIPELINE}, got {pending!r} and "
            f"{_PIPELINE} {ranks}; give --zero-bubble-memory-limit instead, 2p or 60GiB for example"
        )
    return f"{int(pending) / ranks:.6g}p"


def _given(old: Mapping[str, Any], flag: str) -> bool:
    return old[flag.lstrip("-").replace("-", "_")] not in (None, False)

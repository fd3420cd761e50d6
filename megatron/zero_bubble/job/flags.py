"""Our flags, the same for the training loop of this package and for a Megatron-LM job under the launcher."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.job.config import ZeroBubbleConfig

_MOST_RECORDED = 1000
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group ``zero bubble``. What is not given is None, but for the device: ``config_of`` has the defaults."""
    add, fuse = parser.add_argument_group("zero bubble").add_argument, argparse.BooleanOptionalAction
    add(
        "--zero-bubble-schedule",
        metavar="NAME",
        help="schedule to run, one of `zero-bubble list`; default: stock Megatron",
    )
    add(
        "--zero-bubble-schedule-file",
        metavar="FILE",
        help="file with the schedule to run, as `zero-bubble plan --format json` writes it",
    )
    add(
        "--zero-bubble-placement",
        choices=("linear", "vee"),
        help="placement of the stages under zb-auto: one stage per rank, or two in a V; default: linear",
    )
    add(
        "--zero-bubble-memory-limit",
        metavar="LIMIT",
        help="memory limit for zb-auto, 1p or 60GiB; default: 1p, 1F1B's peak",
    )
    _add_switch(
        add,
        "--zero-bubble-post-validation",
        "step the optimizer before the norm of all gradients is known, validate it later",
    )
    add(
        "--zero-bubble-rollback",
        choices=("exact", "inverse"),
        help="how --zero-bubble-post-validation undoes a wrong step; default: exact",
    )
    _add_switch(add, "--zero-bubble-exact", "compute the same bits as stock Megatron: no fused weight gradients")
    add(
        "--zero-bubble-fuse-wgrad",
        action=fuse,
        help="accumulate the weight gradients of a W in one call, in float32 (the default)",
    )
    _add_switch(
        add,
        "--zero-bubble-wgrad-stream",
        "compute weight gradients on a CUDA stream of their own, during the passes that follow",
    )
    add("--zero-bubble-trace", metavar="DIR", help="folder for recorded iterations: timelines, planned above measured")
    add(
        "--zero-bubble-trace-iterations",
        metavar="LIST",
        type=iterations,
        help="iterations to record, such as 10-12,50; default: the last ones",
    )
    add(
        "--zero-bubble-record-costs",
        metavar="FILE",
        help="file for the measured pass times and memory, for `zero-bubble plan --costs`",
    )
    _add_switch(add, "--zero-bubble-log-bubble", "log the bubble, measured and planned")
    add(
        "--zero-bubble-device",
        default="auto",
        choices=("cpu", "cuda", "auto"),
        help="device to train on; default: auto",
    )


def _add_switch(add: Callable[..., argparse.Action], flag: str, text: str) -> None:
    add(flag, action="store_true", default=None, help=text)


def iterations(text: str) -> tuple[range, ...]:
    """Numbers and ranges of iterations, both ends included: ``10-12,50``.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    matches = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
    ranges = [range(int(m[1]), int(m[2] or m[1]) + 1) for m in matches if m]
    if len(ranges) < len(matches) or not all(some and some[0] for some in ranges):
        raise argparse.ArgumentTypeError(
            f"iterations are numbers from 1 on and ranges of them, such as 10-12,50; got {text!r}"
        )
    if sum(len(some) for some in ranges) > _MOST_RECORDED:
        raise argparse.ArgumentTypeError(
            f"at most {_MOST_RECORDED} iterations can be recorded, for they stay in memory until the last; got {text!r}"
        )
    return tuple(ranges)


def has_schedule(options: argparse.Namespace) -> bool:
    """Whether a schedule is asked for, by name or by file."""
    return bool(options.zero_bubble_schedule or options.zero_bubble_schedule_file)


def records(options: argparse.Namespace) -> bool:
    """Whether iterations are to be recorded."""
    return bool(options.zero_bubble_trace or options.zero_bubble_record_costs)


def config_of(
    options: argparse.Namespace,
    num_chunks: int | None = None,
    measure_memory: bool = False,
    peer_timeout_s: float | None = None,
) -> ZeroBubbleConfig:
    """The flags as a configuration.

    Args:
        num_chunks: stages a rank, where the job says so.
        measure_memory: of each pass, once.
        peer_timeout_s: of messages between ranks.

    Raises:
        UserError: flags that exclude each other.
        UserError: of the configuration.
    """
    return ZeroBubbleConfig(
        schedule=options.zero_bubble_schedule,
        schedule_file=options.zero_bubble_schedule_file,
        num_chunks=num_chunks,
        placement=options.zero_bubble_placement or "linear",
        memory_limit=options.zero_bubble_memory_limit or "1p",
        post_validation=bool(options.zero_bubble_post_validation),
        rollback=options.zero_bubble_rollback or "exact",
        fuse_wgrad=_fuses(options),
        wgrad_stream=bool(options.zero_bubble_wgrad_stream),
        measure_memory=measure_memory,
        peer_timeout_s=peer_timeout_s,
    )


def _fuses(options: argparse.Namespace) -> bool:
    if options.zero_bubble_exact and options.zero_bubble_fuse_wgrad:
        raise UserError(
            "--zero-bubble-exact keeps upstream's arithmetic, --zero-bubble-fuse-wgrad another; got both; drop one"
        )
    return options.zero_bubble_fuse_wgrad is not False and not options.zero_bubble_exact


class StrictParser(argparse.ArgumentParser):
    """argparse whose errors are exceptions."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse_ours(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags among those of a job, and the others, untouched.

    Raises:
        UserError: a flag of ours with a value that it does not take, or an unknown one that begins as ours do.
    """
    parser = StrictParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    options, others = parser.parse_known_args(list(arguments))
    for argument in others:
        if argument.startswith(("--zero-bubble-", "--no-zero-bubble-")):
            raise UserError(f"there is no flag {argument.partition('=')[0]}; --help lists those that there are")
    return options, others

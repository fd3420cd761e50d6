"""Run a Megatron-LM script as it is, under a zero-bubble schedule.

    torchrun ... -m megatron.zero_bubble.launch pretrain_gpt.py <its arguments> --zero-bubble-schedule zb-h1

Without a schedule the script runs untouched. On a machine without a GPU, or with --zero-bubble-device cpu, it runs on
CPU ranks over gloo. Our flags are listed in the script's own --help.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.zero_bubble.config import JobError
from megatron.zero_bubble.flags import FlagError, has_schedule, parse_ours
from megatron.zero_bubble.fork_flags import modernize

_USAGE = "usage: python -m megatron.zero_bubble.launch SCRIPT [its arguments] [--zero-bubble-schedule NAME ...]"
_OURS = ("--zero-bubble-", "--no-zero-bubble-", "--help", "-h")


def main(argv: Sequence[str]) -> int:
    """Run ``argv[0]`` with the rest as its arguments; returns the exit code if it is not the script that exits."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n{_USAGE}" if argv else _USAGE, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    script = Path(argv[0])
    if not script.is_file():
        _say(f"the first argument is the script to run, got {argv[0]!r}, which is no file", sys.stderr)
        return 2
    # As `python script.py` has it: the script's folder comes first, and a checkout's megatron.core before any other.
    sys.path[0] = str(script.resolve().parent)
    sys.argv = list(argv)
    asked = join()
    runpy.run_path(str(script), run_name="__main__")
    if asked:
        from megatron.zero_bubble.patching import megatron_lm

        if not megatron_lm.in_force():
            _say(f"{script} has not validated Megatron's flags, so the schedule was never in force", sys.stderr)
            return 1
    return 0


def join() -> bool:
    """Join the job whose script this process runs, before it imports megatron: ``patches/`` puts this call there.

    Flags are read from ``sys.argv`` and, where they are the authors' fork's, rewritten there. What is wrong with them,
    or with the job, ends the process with a sentence, here or when Megatron has validated its flags.

    Returns:
        whether a schedule is asked for.
    """
    sys.excepthook = _in_a_sentence(sys.excepthook)
    arguments, rewritten = modernize(sys.argv[1:])
    options, _ = parse_ours(arguments)
    sys.argv[1:] = arguments
    for line in rewritten:
        _say(line)
    if has_schedule(options) and any(argument.partition("=")[0] == "--yaml-cfg" for argument in arguments):
        raise FlagError(
            "a zero-bubble schedule is checked against flags, which --yaml-cfg replaces; give flags instead"
        )
    on_cpu = _prepare_device(options.zero_bubble_device)
    if not has_schedule(options):
        _say(f"no --zero-bubble-schedule; the script runs as it is{', on CPU ranks' if on_cpu else ''}")
    if any(argument.startswith(_OURS) for argument in arguments):
        from megatron.zero_bubble.patching import megatron_lm

        megatron_lm.install(options, _say)
    return has_schedule(options)


def _in_a_sentence(original: Callable[..., Any]) -> Callable[..., Any]:
    """An excepthook without a traceback for what is meant for people; ``original`` gets the rest."""

    def excepthook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if isinstance(error, (FlagError, JobError)) or _is_refusal(error):  # the same on every rank
            _say(str(error), sys.stderr)
        elif _is_lost_peer(error):
            print(f"zero-bubble: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr, flush=True)
        else:
            original(kind, error, traceback)

    return excepthook


def _is_refusal(error: BaseException) -> bool:
    from megatron.zero_bubble.patching import PatchError, SeamError

    return isinstance(error, (PatchError, SeamError))


def _is_lost_peer(error: BaseException) -> bool:
    from megatron.zero_bubble.runtime.p2p import PeerError

    return isinstance(error, PeerError)


def _prepare_device(name: str) -> bool:
    """Returns whether the job runs on CPU ranks."""
    from megatron.zero_bubble import platforms
    from megatron.zero_bubble.platforms import cpu
    from megatron.zero_bubble.platforms.megatron_lm import JOB_POINTS

    try:
        platform = platforms.select(name)
    except ValueError as error:
        raise FlagError(f"--zero-bubble-device {name}: {error}") from error
    if platform.name != "cpu":
        return False  # the script chooses its GPU
    cpu.install(JOB_POINTS)
    platform.setup(int(os.environ.get("LOCAL_RANK", "0")))
    return True


def _say(line: str, file: Any = None) -> None:
    """A line of the job's log, on its first rank."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"zero-bubble: {line}", file=file or sys.stdout, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

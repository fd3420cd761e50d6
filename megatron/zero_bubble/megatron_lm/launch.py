"""Run a Megatron-LM script as it is, under a zero-bubble schedule.

    torchrun ... -m megatron.zero_bubble.launch pretrain_gpt.py <its arguments> --zero-bubble-schedule zb-h1

Without a schedule the script runs untouched. With --zero-bubble-device cpu, or on a machine without a GPU where the job
asks for gloo, it runs on CPU ranks. Our flags are listed in the script's own --help.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.zero_bubble.errors import PatchError, PeerError, SeamError, UserError
from megatron.zero_bubble.job.flags import has_schedule, parse_ours
from megatron.zero_bubble.job.installed import check_installed
from megatron.zero_bubble.job.rules import Job, check_flags
from megatron.zero_bubble.megatron_lm.fork_flags import modernize

if TYPE_CHECKING:
    from megatron.zero_bubble.runtime.peers import Peers

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
    ending = _Ending(sys.excepthook)
    _join(ending)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        ending.exits(error)
        raise
    return 0


def join() -> None:
    """Join the job whose script this process runs, before it imports megatron: ``patches/`` puts this call there.

    Flags are read from ``sys.argv`` and, where they are the authors' fork's, rewritten there. What is wrong with them,
    or with the job, ends the process with a sentence, here or when Megatron has validated its flags. Processes that the
    job starts do not join it.
    """
    if multiprocessing.parent_process() is None:
        _join(_Ending(sys.excepthook))


def _join(ending: _Ending) -> None:
    sys.excepthook = ending.excepthook
    arguments, rewritten = modernize(sys.argv[1:])
    options, _ = parse_ours(arguments)
    sys.argv[1:] = arguments
    for line in rewritten:
        _say(line)
    if has_schedule(options) and _value_of("--yaml-cfg", arguments) is not None:
        raise UserError(
            "a zero-bubble schedule is checked against flags, which --yaml-cfg replaces; give flags instead"
        )
    check_installed("torch")  # megatron.core is the checkout's own
    check_flags(Job(options, under_launcher=True))
    on_cpu = _prepare_device(options.zero_bubble_device, arguments)
    if not has_schedule(options):
        _say(f"no --zero-bubble-schedule; the script runs as it is{', on CPU ranks' if on_cpu else ''}")
    elif on_cpu:
        _say("on CPU ranks, over gloo")
    if any(argument.startswith(_OURS) for argument in arguments):
        from megatron.zero_bubble.megatron_lm import install as megatron_lm

        # A job that restarts within its processes outlives a rank that is lost.
        restarts = "--inprocess-restart" in arguments
        megatron_lm.install(options, _say, *([] if restarts else [ending.watch_peers]))
        if has_schedule(options) and not {"-h", "--help"} & set(arguments):
            atexit.register(ending.check, megatron_lm.in_force)


class _Ending:
    """How the process ends: in a sentence where it is meant for people, and never silently without its schedule."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._in_error = False
        self._peers: Peers | None = None

    def watch_peers(self) -> None:
        """Called when the process has joined the other ranks: from now on it knows which of them is lost."""
        from megatron.zero_bubble.runtime.peers import Peers

        self._peers = self._peers or Peers()
        self._peers.watch_world()

    def excepthook(self, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        """For ``sys.excepthook``: no traceback for our refusals and for lost peers."""
        self._in_error = True
        if self._peers is not None and self._peers.explain(error):
            return
        if isinstance(error, (UserError, PeerError, PatchError, SeamError)):
            rank = os.environ.get("RANK", "0")
            where = "" if rank == "0" else f"rank {rank}: "
            # Not to sys.stderr: there torch.distributed writes a rank in front of what is printed in an error.
            print(f"zero-bubble: {where}{error}", file=sys.__stderr__, flush=True)
        else:
            self._original(kind, error, traceback)
        if self._peers is not None:
            self._peers.fail(error)

    def exits(self, error: SystemExit) -> None:
        """The script ends by itself; Python calls no ``sys.excepthook`` then."""
        if self._peers is not None:
            self._peers.fail(error)

    def check(self, in_force: Callable[[], bool]) -> None:
        """For ``atexit``."""
        if not self._in_error and not in_force():
            script = sys.argv[0]
            _say(f"{script} has not validated Megatron's flags, so the schedule was never in force", sys.stderr)


def _prepare_device(name: str, arguments: Sequence[str]) -> bool:
    """Returns whether the job runs on CPU ranks: by our flag, or without a GPU where the job asks for gloo. One that
    asks for NCCL is left to say itself that a GPU is missing.
    """
    from megatron.zero_bubble import platforms
    from megatron.zero_bubble.platforms import cpu
    from megatron.zero_bubble.platforms.cpu.megatron_lm import JOB_POINTS

    try:
        platform = platforms.select(name)
    except UserError as error:
        raise UserError(f"--zero-bubble-device {name}: {error}") from error
    asked = name == "cpu" or _value_of("--distributed-backend", arguments) == "gloo"
    if platform.name != "cpu" or not asked:
        return False  # the script chooses its GPU
    cpu.install(JOB_POINTS)
    platform.setup(int(os.environ.get("LOCAL_RANK", "0")))
    return True


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """Of a flag of the job's, the last time it is given."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, attached = argument.partition("=")
        if name == flag:
            value = attached if equals else following
    return value


def _say(line: str, file: Any = None) -> None:
    """A line of the job's log, on its first rank."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"zero-bubble: {line}", file=file or sys.stdout, flush=True)

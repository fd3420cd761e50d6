"""Run an unmodified Megatron-LM script under a zero-bubble schedule.

    torchrun ... -m megatron.zero_bubble.launch pretrain_gpt.py <its arguments> --zero-bubble-schedule zb-h1

To undo the change, drop the flag: without --zero-bubble-schedule, the script runs
unchanged, under Megatron's own schedule. The script runs on CPU ranks with --zero-bubble-device cpu and, on a machine
without a GPU, also with --distributed-backend gloo. A job that cannot run under the schedule ends before training
starts, with one sentence: the rule, the job's value and the remedy. docs/troubleshooting.md lists these sentences.
"""

from __future__ import annotations

import argparse
import atexit
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.zero_bubble.core.errors import PatchError, PeerError, SeamError, UserError, explaining
from megatron.zero_bubble.integration.megatron_lm.checks import check_format
from megatron.zero_bubble.integration.megatron_lm.fork_flags import modernize
from megatron.zero_bubble.planning.job.effects import Job
from megatron.zero_bubble.planning.job.flags import HELP_ALL, add_flags, full_help, parse_ours
from megatron.zero_bubble.planning.job.installed import check_installed
from megatron.zero_bubble.planning.job.rules import check_job

if TYPE_CHECKING:
    from megatron.zero_bubble.engine.runtime.peers import Peers

_USAGE = "python -m megatron.zero_bubble.launch SCRIPT [its arguments] [--zero-bubble-schedule NAME ...]"
_OURS = ("--zero-bubble-", "--no-zero-bubble-", "--help", "-h")


Decide = Callable[[Sequence[str]], tuple[list[str], list[str]]]
"""Replaces flags of a job by what they leave to a decision; returns the flags and log lines."""


def as_given(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Leave nothing to a decision."""
    return list(arguments), []


def main(argv: Sequence[str], decide: Decide = as_given) -> int:
    """Run the script ``argv[0]`` with the other arguments; return the exit code unless the script itself exits."""
    if not argv or argv[0] in ("-h", "--help", HELP_ALL):
        print(_help(argv[0] == HELP_ALL) if argv else f"usage: {_USAGE}", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    script = Path(argv[0])
    if not script.is_file():
        _say(f"the first argument must be the script to run, got {argv[0]!r}, which is not a file", sys.stderr)
        return 2
    # As with `python script.py`, the script's folder comes first, so a checkout's megatron.core precedes any other.
    sys.path[0] = str(script.resolve().parent)
    sys.argv = list(argv)
    ending = _Ending(sys.excepthook)
    _join(ending, decide)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        ending.exits(error)
        raise
    return 0


def _help(everything: bool) -> str:
    parser = argparse.ArgumentParser(
        usage=_USAGE, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
    )
    add_flags(parser)
    return full_help(parser) if everything else parser.format_help()


def join(decide: Decide = as_given) -> None:
    """Enable the zero-bubble flags in the script of this process; ``patches/`` adds this call to Megatron-LM's scripts.

    Call it before the script imports megatron. Flags are read from ``sys.argv``, and flags of the authors' fork are
    rewritten there. An error in the flags or in the job ends the process with a one-line message, here or when Megatron
    has validated its flags. In child processes of the job, this function does nothing.
    """
    if multiprocessing.parent_process() is None:
        _join(_Ending(sys.excepthook), decide)


def _join(ending: _Ending, decide: Decide) -> None:
    sys.excepthook = ending.excepthook
    arguments, rewritten = modernize(sys.argv[1:])
    arguments, decisions = decide(arguments)
    run, _ = parse_ours(arguments)
    sys.argv[1:] = arguments
    for line in (*rewritten, *decisions):
        _say(line)
    check_format(run, _value_of("--yaml-cfg", arguments))
    check_installed("torch")  # megatron.core comes from the checkout
    check_job(Job(run, under_launcher=True))
    on_cpu = _prepare_device(run.observations.device, arguments)
    if not run.has_schedule:
        _say(f"no --zero-bubble-schedule; the script runs unchanged{', on CPU ranks' if on_cpu else ''}")
    elif on_cpu:
        _say("running on CPU ranks over gloo")
    if any(argument.startswith(_OURS) for argument in arguments):
        from megatron.zero_bubble.integration.megatron_lm import install as megatron_lm

        # A job that restarts within its processes survives the loss of a rank.
        restarts = "--inprocess-restart" in arguments
        megatron_lm.install(run, _say, *([] if restarts else [ending.watch_peers]))
        if run.has_schedule and not {"-h", "--help"} & set(arguments):
            atexit.register(ending.check, megatron_lm.in_force)


class _Ending:
    """Handle the end of the process: print user errors in one line, and report a schedule that was never enabled."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._in_error = False
        self._peers: Peers | None = None

    def watch_peers(self) -> None:
        """Start to detect which of the other ranks are lost; called when the process has joined the process group."""
        from megatron.zero_bubble.engine.runtime.peers import Peers

        self._peers = self._peers or Peers()
        self._peers.watch_world()

    def excepthook(self, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        """Replacement for ``sys.excepthook`` that prints no traceback for user errors and lost ranks."""
        self._in_error = True
        if self._peers is not None and self._peers.explain(error):
            return
        if isinstance(error, (UserError, PeerError, PatchError, SeamError)):
            rank = os.environ.get("RANK", "0")
            where = "" if rank == "0" else f"rank {rank}: "
            # Not to sys.stderr, where torch.distributed prefixes the rank to lines printed in an excepthook.
            print(f"zero-bubble: {where}{error}", file=sys.__stderr__, flush=True)
        else:
            self._original(kind, error, traceback)
        if self._peers is not None:
            self._peers.fail(error)

    def exits(self, error: SystemExit) -> None:
        """Notify the other ranks that the script exits; Python does not call ``sys.excepthook`` then."""
        if self._peers is not None:
            self._peers.fail(error)

    def check(self, in_force: Callable[[], bool]) -> None:
        """Report at exit, through ``atexit``, that the schedule was never enabled."""
        if not self._in_error and not in_force():
            script = sys.argv[0]
            _say(f"{script} did not call Megatron's validate_args, so the schedule was never enabled", sys.stderr)


def _prepare_device(name: str, arguments: Sequence[str]) -> bool:
    """Set up CPU ranks if the job uses them; return whether it does.

    It does with ``--zero-bubble-device cpu``, or with ``--distributed-backend gloo`` on a machine without a GPU. A job
    that uses NCCL without a GPU fails with its own message.
    """
    from megatron.zero_bubble.engine import platforms
    from megatron.zero_bubble.engine.platforms import cpu
    from megatron.zero_bubble.engine.platforms.cpu.megatron_lm import JOB_POINTS

    with explaining(f"--zero-bubble-device {name}: "):
        platform = platforms.select(name)
    asked = name == "cpu" or _value_of("--distributed-backend", arguments) == "gloo"
    if platform.name != "cpu" or not asked:
        return False  # the script selects its GPU
    cpu.install(JOB_POINTS)
    platform.setup(int(os.environ.get("LOCAL_RANK", "0")))
    return True


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """The last value of a flag on the job's command line; None if the flag is not given."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, attached = argument.partition("=")
        if name == flag:
            value = attached if equals else following
    return value


def _say(line: str, file: Any = None) -> None:
    """Print a line to the job's log, on rank 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"zero-bubble: {line}", file=file or sys.stdout, flush=True)

"""The flags of a job that follow after ``--`` on the command line of a verb."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron.zero_bubble.cli.launcher import Assumed, processes_of
from megatron.zero_bubble.core.errors import UserError


def add_job_words(verb: argparse.ArgumentParser) -> None:
    """Add the flags of the job, which follow last."""
    verb.add_argument(
        "job",
        nargs=argparse.REMAINDER,
        action=_Job,
        metavar="-- FLAGS",
        help="the flags of the job, after a separate --, or the command that starts it",
    )


class _Job(argparse.Action):
    """The words of a job; of a command with a launcher, also its nodes and processes, unless flags give them."""

    def __call__(self, _: object, namespace: argparse.Namespace, values: Any, __: object = None) -> None:
        setattr(namespace, self.dest, values)
        nodes, per_node = processes_of(_command(values)[0])
        for name, number in (("nodes", nodes), ("gpus_per_node", per_node)):
            if number is not None and isinstance(getattr(namespace, name, None), Assumed):
                setattr(namespace, name, number)


def _command(job: Sequence[str]) -> tuple[list[str], list[str]]:
    """What starts a script, if the words of a job are a command, and the flags."""
    words = list(job[1:] if job[:1] == ["--"] else job)
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    if script is None or words[0].startswith("-"):
        return [], words
    return words[:script], words[script + 1 :]


def job_words(options: argparse.Namespace) -> list[str]:
    """Return the flags of the job; of a command that starts it, those of its script.

    Raises:
        UserError: a script, or all flags in one argument.
    """
    words = _command(options.job)[1]
    if words and not words[0].startswith("-"):
        raise UserError(
            f"what follows -- must be the flags of the job, which begin with --; got {words[0]:.60}; give the flags "
            "themselves, as the training script gets them, or its folder to zero-bubble catalogue"
        )
    if together := next((word for word in words if word.startswith("--") and " --" in word), None):
        raise UserError(
            f"every flag and every value of the job must be an argument of its own; got {together[:40]!r} and more in "
            "one; leave out the quotes around them"
        )
    return words

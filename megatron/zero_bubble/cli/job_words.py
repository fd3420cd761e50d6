"""The flags of a job that follow after ``--`` on the command line of a verb."""

from __future__ import annotations

import argparse

from megatron.zero_bubble.core.errors import UserError


def add_job_words(verb: argparse.ArgumentParser) -> None:
    """Add the flags of the job, which follow last."""
    verb.add_argument(
        "job", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="the flags of the job, after a separate --"
    )


def job_words(options: argparse.Namespace) -> list[str]:
    """Return the flags of the job; of a command that starts it, those of its script.

    Raises:
        UserError: a script, or all flags in one argument.
    """
    words = list(options.job[1:] if options.job[:1] == ["--"] else options.job)
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    if words and not words[0].startswith("-") and script is not None:
        words = words[script + 1 :]
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

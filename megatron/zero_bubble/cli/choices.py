"""What the flags of ``plan`` and ``compare`` choose, for the table of exclusions."""

from __future__ import annotations

import argparse
from typing import Any

_OF_COSTS = ("attention_share",)
"""Flags that are about the costs here, and a choice of a job."""


def choices_of(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """What the flags of ``plan`` choose, or those of them that ``names`` lists."""
    return {name: value for name, value in vars(options).items() if name not in _OF_COSTS and name in (names or [name])}


def common_choices(options: argparse.Namespace) -> dict[str, Any]:
    """What all rows of ``compare`` have in common.

    Layouts by cost are rows of their own, and so are schedules with and without the passes of the vocabulary for
    ``--vocabulary auto``; not so with sharded units, which have neither.
    """
    choices = choices_of(options)
    if not options.shard_weights:
        choices["layout"] = None
        if options.vocabulary == "auto":
            choices["vocabulary"] = None
    return choices

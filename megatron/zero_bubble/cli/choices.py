"""What the flags of ``plan`` and ``compare`` and their files choose, for the table of exclusions."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.ir.vocabulary import algorithm_of
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.vocabulary import are_divided


def choices_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the flags of ``plan`` choose; the share of attention is one of the costs here, and a choice of a job."""
    return {name: value for name, value in vars(options).items() if name != "attention_share"}


def choices_of_files(costs: Figures, file: Schedule | None = None) -> dict[str, Any]:
    """What the costs and a schedule file choose, in addition to the flags."""
    choices: dict[str, Any] = {"vocabulary": "auto"} if are_divided(costs) else {}
    if file is not None:
        choices["num_slices"] = file.num_slices
        choices |= {} if (own := algorithm_of(file)) is None else {"vocabulary": own}
    return choices


def common_choices(options: argparse.Namespace) -> dict[str, Any]:
    """What all rows of ``compare`` have in common.

    Schedules with and without the passes of the vocabulary are rows of their own for ``--vocabulary auto``; not so with
    sharded units, which have none.
    """
    choices = choices_of(options)
    if options.vocabulary == "auto" and not options.shard_weights:
        choices["vocabulary"] = None
    return choices

"""The check of ``--zero-bubble-vocabulary-parallel off`` against a schedule file, whose passes decide."""

from __future__ import annotations

import argparse

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.planning.source import ScheduleSource


def check_divided(options: argparse.Namespace, source: ScheduleSource) -> None:
    """Raise UserError if the flags leave the vocabulary undivided, and the schedule file has passes of its shards."""
    if source.vocabulary is not None and options.zero_bubble_vocabulary_parallel == "off":
        raise UserError(
            "--zero-bubble-vocabulary-parallel must be that of the schedule file, "
            f"{source.vocabulary}; got off with {source.name}; drop the flag, or write another file with zero-bubble "
            "plan --vocabulary off"
        )

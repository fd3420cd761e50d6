"""The length of sequences, and the fewest tokens of a slice that a run has measured."""

from __future__ import annotations

from typing import NamedTuple


class SequenceTokens(NamedTuple):
    """What bounds how finely sequences are cut.

    Attributes:
        sequence: tokens of a sequence.
        least: fewest tokens of a slice whose matrix products take at most 10 % more time per token than those of the
            whole sequence; None if not measured.
    """

    sequence: int
    least: int | None = None

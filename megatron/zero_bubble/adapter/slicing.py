"""The histories of slices as a part of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.zero_bubble.adapter.facts import IterationFacts
from megatron.zero_bubble.adapter.history import Histories
from megatron.zero_bubble.adapter.part import Part


class Slicing(Part):
    """Keeps the keys and values that the slices of a sequence share.

    Attributes:
        histories: those of all chunks of this rank.
    """

    def __init__(self) -> None:
        self.histories = Histories()

    @contextmanager
    def iteration(self, iteration: IterationFacts) -> Iterator[None]:
        """See ``Part``. Afterwards, no history is left, also if the iteration failed."""
        try:
            yield
        finally:
            self.histories.clear()

    @property
    def num_pending(self) -> int:
        """Number of stages and microbatches whose keys and values are kept."""
        return len(self.histories)

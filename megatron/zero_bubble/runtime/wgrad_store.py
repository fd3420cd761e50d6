"""The store of deferred weight gradients: B puts, W takes, in the order of the microbatches.

A deferred gradient is a value that knows how to compute and accumulate itself; the store only keeps them by the pass
they belong to. One store serves all the stages of a rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from megatron.zero_bubble.ir import Kind, Pass


class Deferred(Protocol):
    """The weight gradient of one use of one weight in one microbatch."""

    def prefetch(self) -> None:
        """Start the communication that ``run`` needs, if any."""
        ...

    def run(self) -> None:
        """Compute the gradient and accumulate it."""
        ...

    def tensors(self) -> Iterable[torch.Tensor]:
        """What is kept until ``run``."""
        ...


class WgradStore:
    """Deferred weight gradients by (stage, microbatch, slice)."""

    def __init__(self) -> None:
        self._stored: dict[Pass, list[Deferred]] = {}
        self._current: Pass | None = None

    @property
    def deferring(self) -> bool:
        """Whether the pass that runs now has a W of its own, so that linears leave their weight gradient here."""
        return self._current is not None

    @contextmanager
    def defer(self, work: Pass) -> Iterator[None]:
        """Within the F and the B of a split microbatch: linears defer, and B's gradients are stored for its W."""
        self._current = Pass(work.stage, Kind.W, work.microbatch, work.slice)
        try:
            yield
        finally:
            self._current = None

    def put(self, deferred: Deferred) -> None:
        """Store a gradient for the W of the pass that runs now."""
        assert self._current is not None, "a deferred linear ran its backward outside a split B"
        self._stored.setdefault(self._current, []).append(deferred)

    def run(self, work: Pass) -> None:
        """Run the W ``work``: each gradient while the next one's communication is under way."""
        entries = deque(self._stored.pop(work, ()))
        if entries:
            entries[0].prefetch()
        while entries:
            deferred = entries.popleft()  # popped, so that its tensors go as soon as it has run
            if entries:
                entries[0].prefetch()
            deferred.run()

    def tensors(self, work: Pass) -> Iterator[torch.Tensor]:
        """What is kept until the W ``work``."""
        for deferred in self._stored.get(work, ()):
            yield from deferred.tensors()

    def clear(self) -> None:
        """Forget everything: the schedule starts anew (Megatron re-runs a step that it wants to attribute)."""
        self._stored.clear()

    def __len__(self) -> int:
        return sum(map(len, self._stored.values()))

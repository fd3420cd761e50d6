"""Work beside the passes: on a stream of its own, or, where there is none, right away."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch


class Beside(Protocol):
    """Runs work in the order it is given, beside what the caller does next."""

    def run(self, work: Callable[[], None], uses: Iterable[torch.Tensor]) -> None:
        """Begin once all that was queued before is done; ``uses`` are the tensors that nobody else keeps for it."""

    def join(self) -> None:
        """Order what the caller queues after this behind all work; the host does not wait."""


class RightAway:
    """Runs work when it is given."""

    def run(self, work: Callable[[], None], uses: Iterable[torch.Tensor]) -> None:
        work()

    def join(self) -> None:
        pass

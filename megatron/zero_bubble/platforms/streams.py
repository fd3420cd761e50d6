"""Run work concurrently with the passes on a side stream, or inline where there are no streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch


class SideStream(Protocol):
    """Runs work in the order it is given, concurrently with what the caller does next."""

    def run(self, work: Callable[[], None], uses: Iterable[torch.Tensor]) -> None:
        """Begin once all that was queued before is done; ``uses`` are the tensors that nothing else keeps for it."""

    def join(self) -> None:
        """Order what the caller queues after this behind all work; the host does not wait."""


class Inline:
    """Runs work when it is given."""

    def run(self, work: Callable[[], None], uses: Iterable[torch.Tensor]) -> None:
        work()

    def join(self) -> None:
        pass

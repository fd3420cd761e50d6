"""Runs work concurrently with the passes on a side stream, or inline on devices without streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch


class SideStream(Protocol):
    """Runs work items in order, concurrently with the caller's later work."""

    def run(self, work: Callable[[], None], uses: Iterable[torch.Tensor]) -> None:
        """Run ``work`` after everything queued so far; the stream keeps the memory of ``uses`` until it is done."""

    def join(self) -> None:
        """Make the caller's later work wait for all work items; the host does not wait."""


class Inline:
    """Runs work at once, in the caller."""

    def run(self, work: Callable[[], None], uses: Iterable[torch.Tensor]) -> None:
        work()

    def join(self) -> None:
        pass

"""Work concurrent with the passes, on streams of its own; done at once on devices without streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Protocol

import torch


class SideStream(Protocol):
    """Runs work items in order, concurrently with the caller's later work."""

    def run(self, work: Callable[[], None], uses: Iterable[torch.Tensor]) -> None:
        """Run ``work`` after everything queued so far; the stream keeps the memory of ``uses`` until it is done."""

    def join(self) -> None:
        """Make the caller's later work wait for all work items; the host does not wait."""


class HostCopy(ABC):
    """A tensor on its way to host memory."""

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """Wait until the copy has arrived, but not for work queued after it started; returns it, without gradient."""


class Inline:
    """Runs work at once, in the caller."""

    def run(self, work: Callable[[], None], uses: Iterable[torch.Tensor]) -> None:
        work()

    def join(self) -> None:
        pass


class AlreadyThere(HostCopy):
    """A ``HostCopy`` of a tensor that is in host memory: the tensor itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()

    def wait(self) -> torch.Tensor:
        return self._tensor

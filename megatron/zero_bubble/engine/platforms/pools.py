"""Pools of device memory, for allocations that are freed and made again at the same sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class MemoryPool(Protocol):
    """Memory of the device that only its own allocations use again after they are freed."""

    def allocate(self, work: Callable[[], None]) -> None:
        """Run ``work``, whose allocations come from this pool. It runs again from the start if memory runs out first,
        after the device has got back what other pools keep unused.
        """


class CommonPool:
    """The memory that everything uses."""

    def allocate(self, work: Callable[[], None]) -> None:
        work()

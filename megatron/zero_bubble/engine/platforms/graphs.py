"""Graphs: work that is recorded once, and then repeated in the same memory without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Repeat the work. It reads and writes the memory that it used when it was recorded."""


class GraphPool(Protocol):
    """Memory of graphs that are recorded, and repeated, in one order. A graph may overwrite what was free in its pool
    when it was recorded, but nothing in other pools.
    """

    def capture(self, work: Callable[[], Result]) -> tuple[Graph, Result]:
        """Record ``work`` without running it. The tensors among its results keep their memory while they are referred
        to, and have their values after a replay.
        """

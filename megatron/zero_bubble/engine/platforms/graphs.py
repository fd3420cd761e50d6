"""Graphs: work that is recorded once, and then repeated in the same memory without Python."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Context around captures: garbage is collected before them, and none within.

    What Python finds to be garbage may have called the driver to be created, such as pinned memory or another graph,
    and freeing it ends a capture with an error. Older versions of torch collect garbage before every capture, which
    takes longer than the capture itself, so they get nothing to look at: what exists is frozen meanwhile.
    """
    gc.collect()
    was_enabled, freezes = gc.isenabled(), not gc.get_freeze_count()
    gc.disable()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()

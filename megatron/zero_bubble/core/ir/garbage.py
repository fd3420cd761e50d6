"""Build large schedules and plans without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Pause Python's garbage collector.

    A schedule or a plan is up to millions of small tuples without cycles. The collector walks all of them again and
    again while they are made: for 64 ranks and 512 microbatches it takes more than half the time of lowering.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

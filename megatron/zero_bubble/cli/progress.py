"""Progress of a long command, in one line on the terminal that is erased at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_ERASE = "\r\x1b[K"


@contextmanager
def progress(verb: str, steps: Sequence[tuple[str, T]]) -> Iterator[Iterator[T]]:
    """Iterate over named steps; on a terminal, stderr shows ``verb``, the number and the name of the current one."""
    shown = sys.stderr.isatty()

    def each() -> Iterator[T]:
        for number, (name, step) in enumerate(steps, 1):
            if shown:
                print(f"{_ERASE}{verb} {name} ({number} of {len(steps)})", end="", file=sys.stderr, flush=True)
            yield step

    try:
        yield each()
    finally:
        if shown:
            print(_ERASE, end="", file=sys.stderr, flush=True)

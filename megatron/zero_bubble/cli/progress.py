"""Progress of a long command on stderr: on a terminal one line that is erased at the end, elsewhere a line now and
then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import TypeVar

T = TypeVar("T")
_ERASE = "\r\x1b[K"
_QUIET_S, _MOST_QUIET_S = 4.0, 60.0
"""Time to the first line where stderr is not a terminal, and the most between two lines; each wait is twice the one
before it.
"""


class _Step:
    """What the command does at present."""

    def __init__(self, what: str) -> None:
        self.what, self._shown = what, sys.stderr.isatty()

    def begin(self, what: str) -> None:
        self.what = what
        if self._shown:
            print(f"{_ERASE}{what}", end="", file=sys.stderr, flush=True)

    def result(self, line: str) -> None:
        """Show a line that stays, on a terminal; elsewhere the results follow at the end."""
        if self._shown:
            print(f"{_ERASE}{line}\n{self.what}", end="", file=sys.stderr, flush=True)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Context in which the steps are shown."""
        ended = Event()
        if not self._shown:
            Thread(target=self._report, args=(ended,), daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            if self._shown:
                print(_ERASE, end="", file=sys.stderr, flush=True)

    def _report(self, ended: Event) -> None:
        started, wait = time.monotonic(), _QUIET_S
        while not ended.wait(wait):
            print(f"{self.what}, {time.monotonic() - started:.0f} s so far", file=sys.stderr, flush=True)
            wait = min(2 * wait, _MOST_QUIET_S)


@contextmanager
def progress(
    verb: str, steps: Sequence[tuple[str, T]], so_far: Callable[[], str] = lambda: ""
) -> Iterator[tuple[Iterator[T], Callable[[str], None]]]:
    """Iterate over named steps, and show ``verb``, the name and the number of the current one, and the text that
    ``so_far`` returns. The second function that it yields shows a result on a terminal as soon as it is known.
    """
    shown = _Step(verb)

    def each() -> Iterator[T]:
        for number, (name, step) in enumerate(steps, 1):
            shown.begin(f"{verb} {name} ({number} of {len(steps)}){so_far()}")
            yield step

    with shown.reported():
        yield each(), shown.result


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Context, or decorator of a function, that shows ``what``, and then what the function that it yields is given."""
    step = _Step(what)
    with step.reported():
        step.begin(what)
        yield step.begin

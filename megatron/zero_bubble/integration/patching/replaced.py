"""Replace upstream names all together, and restore their originals all together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from megatron.zero_bubble.integration.patching.seam import Seam

# A seam, and a function that makes the replacement from the original.
Replacement = tuple[Seam, Callable[[Callable[..., Any]], Callable[..., Any]]]


def around(replacement: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes a replacement of a function that takes the original before the arguments of each call."""

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        return call

    return made


class Replaced:
    """Replaced names in order of replacement. Only this class and the CPU platform assign to a foreign module."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Seam, ModuleType | type, Callable[..., Any]]] = []
        self._close: Callable[[], None] = lambda: None

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def replace(self, replacements: Iterable[Replacement], close: Callable[[], None] = lambda: None) -> None:
        """Check every seam first, then replace all of them, so that an error leaves nothing replaced.

        ``revert`` calls ``close``.
        """
        resolved = [(seam, make, *seam.resolve()) for seam, make in replacements]
        for seam, make, holder, original in resolved:
            setattr(holder, seam.attribute, make(original))
            self._replaced.append((seam, holder, original))
        self._close = close

    def revert(self) -> None:
        """Restore the originals, in reverse order, and call ``close``."""
        close, self._close = self._close, lambda: None
        while self._replaced:
            seam, holder, original = self._replaced.pop()
            setattr(holder, seam.attribute, original)
        close()

    def report(self) -> list[str]:
        """One line per name that is currently replaced."""
        return [f"{seam.module}.{seam.name}: {seam.why}" for seam, _, _ in self._replaced]

"""A titled group of command-line flags, each with one line of help and its default."""

from __future__ import annotations

import argparse
from typing import Any


class Group:
    """A group of flags in ``--help``; the help of a flag with a default ends with it."""

    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self._group = parser.add_argument_group(title)

    def add(self, flag: str, text: str, default: Any = None, **options: Any) -> None:
        ending = "" if default is None or default is True else " (default: %(default)s)"
        self._group.add_argument(flag, help=text + ending, default=default, **options)

    def on(self, flag: str, text: str) -> None:
        self._group.add_argument(flag, action="store_true", help=text)

    def off(self, flag: str, dest: str, text: str) -> None:
        self._group.add_argument(flag, action="store_false", dest=dest, help=text)

    def whole(self, flag: str, text: str, default: int | None = None, metavar: str = "N", **options: Any) -> None:
        self.add(flag, text, default, type=int, metavar=metavar, **options)

    def real(self, flag: str, text: str, default: float | None = None, metavar: str = "X", **options: Any) -> None:
        self.add(flag, text, default, type=float, metavar=metavar, **options)

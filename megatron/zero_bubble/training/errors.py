"""The one exception that ends a run with a sentence instead of a traceback."""

from __future__ import annotations


class UsageError(ValueError):
    """Something the user gave cannot work. The message is one sentence: the rule, the values, the remedy.

    The entry point prints it on stderr and exits with code 2.

    Attributes:
        everywhere: every rank raises the same error, so that rank 0 alone prints it.
    """

    def __init__(self, message: str, everywhere: bool = True) -> None:
        super().__init__(message)
        self.everywhere = everywhere

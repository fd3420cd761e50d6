"""The exceptions of this package that more than one layer knows."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user gave cannot work. The message is for people: the rule, the values, the remedy.

    Entry points print it on stderr and exit with code 2, without a traceback.

    Attributes:
        everywhere: every rank raises the same error, so rank 0 alone prints it.
    """

    def __init__(self, message: str, everywhere: bool = True) -> None:
        super().__init__(message)
        self.everywhere = everywhere


class PlanError(UserError):
    """A plan that could deadlock or lose data; the message says which rank waits for what."""


class PeerError(RuntimeError):
    """A peer did not deliver or did not take a message; the text names ranks of the pipeline, channel and pass."""


class SeamError(RuntimeError):
    """Upstream does not offer a seam as this package knows it."""


class PatchError(RuntimeError):
    """Names are replaced already."""

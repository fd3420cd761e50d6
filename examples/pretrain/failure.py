"""Messages for the loss of a rank: every other rank prints what it was doing and exits with code 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.zero_bubble.core.errors import PeerError
from megatron.zero_bubble.engine.runtime.transport import lost_connection


@contextmanager
def during(activity: str) -> Iterator[None]:
    """Add ``activity``, a note of what the run was doing, to errors raised in this block."""
    try:
        yield
    except Exception as error:
        error.__notes__ = [*getattr(error, "__notes__", []), activity]  # Python 3.10 has no add_note
        raise


def lost_peer(error: BaseException) -> str | None:
    """The message for an error that a dead or silent rank caused: the notes of :func:`during` and the reason."""
    activity = ", ".join(reversed(getattr(error, "__notes__", ["this rank"])))
    if isinstance(error, PeerError):
        return f"{activity}: {error}"
    reason = lost_connection(error)
    if reason is None:
        return None
    return f"{activity}: another rank has failed or hangs ({reason}); look at the output of the other ranks first"

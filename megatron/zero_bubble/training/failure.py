"""How a run ends when one of its ranks is gone: every other rank says what it was doing, and exits with code 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.zero_bubble.errors import PeerError
from megatron.zero_bubble.runtime.transport import lost_connection


@contextmanager
def during(activity: str) -> Iterator[None]:
    """A block whose errors carry a note of what the run was doing."""
    try:
        yield
    except Exception as error:
        error.__notes__ = [*getattr(error, "__notes__", []), activity]  # add_note, which Python 3.10 has not
        raise


def lost_peer(error: BaseException) -> str | None:
    """One paragraph if ``error`` came from a rank that is gone or silent: what :func:`during` noted, and the reason."""
    activity = ", ".join(reversed(getattr(error, "__notes__", ["this rank"])))
    if isinstance(error, PeerError):
        return f"{activity}: {error}"
    reason = lost_connection(error)
    if reason is None:
        return None
    return f"{activity}: another rank has died or hangs ({reason}); look at the output of the others first"

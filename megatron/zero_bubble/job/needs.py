"""What a feature needs of a job."""

from __future__ import annotations

from typing import Any, NamedTuple


class Need(NamedTuple):
    """A Megatron option, the only value of it that a feature supports, why, and what the user can do."""

    name: str
    value: Any
    why: str
    remedy: str

"""The parts of an op that occupies several lanes of its rank."""

from __future__ import annotations

from typing import NamedTuple


class LanePart(NamedTuple):
    """A part of an op on a lane of its rank. It starts when its lane is free, and when the previous part of the same
    pass has ended.

    Attributes:
        work: the position of the pass among the op's ``works``; None for what no other pass waits for, such as weight
            gradients. What a pass gives is there at the end of its last part.
    """

    lane: str
    ms: float
    work: int | None

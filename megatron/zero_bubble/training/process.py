"""Who this process is among those that torchrun started. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """This process by the variables that torchrun sets; a world of one when they are absent."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    under_torchrun: bool

    @classmethod
    def from_environment(cls) -> Launch:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."""

        def number(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        return cls(
            rank=number("RANK", 0),
            world_size=number("WORLD_SIZE", 1),
            local_rank=number("LOCAL_RANK", 0),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            under_torchrun="RANK" in os.environ,
        )

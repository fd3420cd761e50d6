"""Rank and world size of this process, from the variables that torchrun sets. Does not import torch."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """Rank and world size of this process; without torchrun, rank 0 in a world of one."""

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

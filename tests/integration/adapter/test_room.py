"""Tests of the memory limit that a run measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.ranks import RankPool


def limit_measured(rank: int) -> str:
    from megatron.zero_bubble.integration.adapter import room

    spare = (6 * 2**30, 2**30)[rank]
    memory: Any = SimpleNamespace(peak=(2**30, 2**29)[rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "select", lambda name: SimpleNamespace(spare_memory_bytes=lambda: spare))
        return room.measured_limit(memory)


def test_the_fullest_rank_decides(ranks: RankPool) -> None:
    """It has 1 GiB free beyond the half that its activations take."""
    assert ranks.run(2, limit_measured) == ["1.500GiB"] * 2

"""Tests of the alignment of several hosts' clocks, and of the stated error."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble.engine.measure.clocks import GroupClock, Offset, offset_between
from tests.helpers.ranks import RankPool

delays = st.floats(0.0, 0.01)


@st.composite
def gathers(draw: st.DrawFn) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Draw the times when two ranks enter and leave gathers, on one clock; no rank leaves before both have entered."""
    rounds = []
    now = 100.0
    for _ in range(draw(st.integers(1, 6))):
        enters = now + draw(delays), now + draw(delays)
        exits = [max(enters) + draw(delays) for _ in enters]
        rounds.append(((enters[0], exits[0]), (enters[1], exits[1])))
        now = max(exits)
    return rounds


@given(gathers(), st.floats(-1e5, 1e5))
def test_offset_is_within_the_stated_error(
    rounds: list[tuple[tuple[float, float], tuple[float, float]]], true_offset: float
) -> None:
    own = [(enter + true_offset, leave + true_offset) for (enter, leave), _ in rounds]
    measured = offset_between(own, [first for _, first in rounds])
    assert abs(measured.seconds - true_offset) <= measured.error_s + 1e-9
    shortest = min(max(own[1], first[1]) - min(own[0], first[0]) for own, first in rounds)
    assert measured.error_s <= shortest + 1e-9


def offsets(rank: int, ahead_s: list[float], hosts: list[str]) -> list[Offset]:
    """Measure twice with a clock that is ahead by ``ahead_s[rank]``."""
    assert dist.group.WORLD is not None
    clock = GroupClock(dist.group.WORLD, lambda: time.perf_counter() + ahead_s[rank], hosts[rank])
    return [clock.measure(), clock.measure()]


def test_offsets_of_ranks_on_several_hosts(ranks: RankPool) -> None:
    """Two ranks share the first host's clock; a third rank is on another host."""
    ahead_s = [0.0, 0.0, -3600.25]
    first, same_host, other_host = ranks.run(3, offsets, ahead_s, ["a", "a", "b"])
    assert first == same_host == [Offset(0.0, 0.0)] * 2
    for offset in other_host:
        assert 0.0 < offset.error_s < 1.0
        assert abs(offset.seconds - ahead_s[2]) <= offset.error_s


@pytest.mark.parametrize("ahead_s", [[0.0, 5.0]])
def test_ranks_on_one_host_have_no_offset(ranks: RankPool, ahead_s: list[float]) -> None:
    """Offsets on one host are not measured, so the clocks' values do not matter."""
    assert ranks.run(2, offsets, ahead_s, ["a", "a"]) == [[Offset(0.0, 0.0)] * 2] * 2


def own_hosts(_rank: int) -> bool:
    assert dist.group.WORLD is not None
    return GroupClock(dist.group.WORLD)._is_shared


def test_processes_on_one_machine_share_a_host(ranks: RankPool) -> None:
    assert ranks.run(2, own_hosts) == [True, True]

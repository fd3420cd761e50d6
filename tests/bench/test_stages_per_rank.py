"""The comparison of random settings reports a plan that is longer than a named schedule in its memory."""

from __future__ import annotations

import sys

import pytest

from bench import stages_per_rank
from bench.stages_per_rank import Setting, longer_than_named
from megatron.zero_bubble import PassCosts, PassMemory, Placement

LINE = Placement.linear(2)
SMALL = Setting(2, 3, 2, PassCosts.uniform(LINE, 3.0, 4.0, 2.0), PassMemory.uniform(LINE), 3.0, "makespan")


def test_a_longer_plan_is_reported_with_the_shorter_schedules_that_fit() -> None:
    found = list(longer_than_named(SMALL, 1000.0))
    assert any(sentence.startswith("gis takes") for sentence in found)
    assert not list(longer_than_named(SMALL, SMALL.ms(SMALL.search("loop", 2))))


def test_the_settings_are_searched_and_summed_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages_per_rank, "random_setting", lambda _: SMALL)
    monkeypatch.setattr(sys, "argv", ["stages_per_rank", "1", "--first", "7"])
    assert stages_per_rank.main() == 0
    assert capsys.readouterr().out.endswith("0 wrong of 1; median gain at m <= p, p >= 4: none (0 settings)\n")

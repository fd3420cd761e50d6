"""The picture of bubbles over memory limits by stages per rank."""

from __future__ import annotations

import pytest

from bench import stages_frontier
from bench.stages_frontier import Setting, bubbles, draw_all, panels


@pytest.mark.full
def test_more_memory_never_means_a_larger_bubble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_frontier, "P", 2)
    monkeypatch.setattr(stages_frontier, "LIMITS", (0.5, 1.0, 2.0))
    setting = Setting(2, 12, 12, 12, 0.2)
    found = {
        name: bubbles(setting, name) for name in ("one per rank", "two per rank, on a V", "four per rank, on a loop")
    }
    assert [limit for limit, _ in found["two per rank, on a V"]] == [1.0, 2.0], "half a microbatch admits nothing"
    for rates in found.values():
        assert [rate for _, rate in rates] == sorted((rate for _, rate in rates), reverse=True)
    assert found["four per rank, on a loop"][-1][1] < found["one per rank"][-1][1]


def test_every_placement_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_frontier, "LIMITS", (8.0,))
    monkeypatch.setattr(stages_frontier, "PLACED", {"two per rank, on a V": ("vee", None)})
    svg = draw_all(list(panels(1, (Setting(1, 1, 1, 1, 0),))))
    assert "1 microbatches; F 1, B 1, W 1, transfer 0 ms" in svg and "two per rank, on a V" in svg

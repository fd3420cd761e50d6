"""The plans that a pipeline keeps."""

from __future__ import annotations

from megatron.zero_bubble.integration.adapter.recent import Recent


def test_the_value_that_was_not_used_for_the_longest_time_is_forgotten() -> None:
    kept: Recent[int, str] = Recent(2)
    kept[1], kept[2] = "one", "two"
    assert kept.get(1) == "one"
    kept[3] = "three"
    assert (kept.get(1), kept.get(2), kept.get(3)) == ("one", None, "three") and len(kept) == 2
    kept[1] = "other"
    kept[4] = "four"
    assert (kept.get(1), kept.get(3)) == ("other", None)
    kept.clear()
    assert len(kept) == 0 and kept.get(1) is None

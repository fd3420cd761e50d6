"""The bench of emulated passes says what ran otherwise than planned."""

from __future__ import annotations

import pytest

from bench.emulated_compute import differs


def test_a_pass_that_is_far_from_its_plan_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    near, far = (
        {"num_ranks": 2, "case": f"zb-v, M={m}", "worst": [ms, "0F1", 1]} for m, ms in ((1, 0.009), (2, 0.011))
    )
    assert not differs([near]) and not capsys.readouterr().out
    assert differs([near, far])
    assert capsys.readouterr().out == "P=2, zb-v, M=2: 0.011000 ms from the plan at 0F1 on rank 1\n"

"""Tests of the bench of emulated passes: deviations from the plan are printed."""

from __future__ import annotations

import pytest

from bench.emulated_compute import differs


def test_pass_that_deviates_from_the_plan_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    near, far = (
        {"num_ranks": 2, "case": f"zb-v, M={m}", "worst": [ms, "0F1", 1]} for m, ms in ((1, 0.009), (2, 0.011))
    )
    assert not differs([near]) and not capsys.readouterr().out
    assert differs([near, far])
    assert capsys.readouterr().out == "P=2, zb-v, M=2: 0.011000 ms from the plan at 0F1 on rank 1\n"

"""Tests of the table of features that no GPU has measured: no row outlives its measurement."""

from __future__ import annotations

import re
from datetime import date

import pytest

from gpu_day.steps import OK, PARTS
from gpu_day.unmeasured import UNMEASURED, Unmeasured
from megatron.zero_bubble.planning.decisions import DECISIONS
from site_parts.gpu import stored

STEPS = {step.name for part in PARTS.values() for step in part.steps}
MEASURED = {step["name"] for part in stored().values() for step in part["steps"] if step["status"] == OK}


@pytest.mark.parametrize("row", UNMEASURED, ids=lambda row: row.feature)
def test_rows_wait_for_steps_that_exist_and_have_not_succeeded(row: Unmeasured) -> None:
    assert set(row.steps) <= STEPS
    assert not row.steps or not set(row.steps) <= MEASURED, f"{row.feature} is measured: promote or remove it"
    assert date.fromisoformat(row.since) <= date.today()


@pytest.mark.parametrize("row", UNMEASURED, ids=lambda row: row.feature)
def test_rows_name_flags_that_exist(row: Unmeasured) -> None:
    ours = {f"--zero-bubble-{each.flag}" for each in DECISIONS if each.tier != "retired"}
    assert set(re.findall(r"--zero-bubble-[a-z-]+", row.flags)) <= ours
    assert row.promotes and row.removes

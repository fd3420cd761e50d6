"""Tests of the planning process of a run: its results, and that it leaves no files or processes."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.integration.adapter.planner import Planner
from megatron.zero_bubble.planning import worker
from megatron.zero_bubble.planning.setup import Searched, Setup
from tests.planning.test_worker import REQUEST


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirect the planners' temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_plan_is_returned(folder: Path) -> None:
    assert Planner(REQUEST).result() == (worker.plan(REQUEST).schedule, "switched to the planned schedule")
    assert not list(folder.iterdir())


def test_planning_error_is_returned(folder: Path) -> None:
    schedule, said = Planner(replace(REQUEST, setup=Setup(Searched(limit="0.1p")))).result()
    assert schedule is None
    assert said.startswith("no plan, the schedule stays as it is: the memory limit admits no schedule: ")
    assert not list(folder.iterdir())


def test_killed_planner_leaves_no_files(folder: Path) -> None:
    planner = Planner(replace(REQUEST, num_microbatches=64))
    assert list(folder.iterdir())
    planner.kill()
    assert planner.finished() and not list(folder.iterdir())

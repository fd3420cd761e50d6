"""The planning process of a run: what comes of it, and that nothing is left of it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.adapter.planner import Planner
from megatron.zero_bubble.planning import worker
from tests.planning.test_worker import REQUEST


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where planners have their files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_plan_comes_back(folder: Path) -> None:
    assert Planner(REQUEST).result() == (worker.plan(REQUEST).schedule, "switched to the planned schedule")
    assert not list(folder.iterdir())


def test_a_refusal_comes_back(folder: Path) -> None:
    schedule, said = Planner(replace(REQUEST, memory_limit="0.1p")).result()
    assert schedule is None
    assert said.startswith("no plan, the schedule stays as it is: the memory limit admits no schedule: ")
    assert not list(folder.iterdir())


def test_a_planner_is_killed(folder: Path) -> None:
    planner = Planner(replace(REQUEST, num_microbatches=64))
    assert list(folder.iterdir())
    planner.kill()
    assert planner.finished() and not list(folder.iterdir())

"""Tests of ranks under CUDA's Multi-Process Service, with a program in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_day import mps


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the service is asked to do, one line per call."""
    calls = tmp_path / "calls"
    program = tmp_path / mps.CONTROL
    program.write_text(f'#!/bin/sh\nif [ "$1" = -d ]; then echo start; else cat; fi >> {calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name in (mps.PIPES, mps.LOGS, mps.SHARE):
        monkeypatch.setenv(name, "")
    return calls


@pytest.mark.parametrize(("works", "ranks", "ran"), [(True, 4, True), (False, 4, True), (True, 1, False)])
def test_service_runs_while_ranks_do(
    calls: Path, monkeypatch: pytest.MonkeyPatch, works: bool, ranks: int, ran: bool
) -> None:
    monkeypatch.setattr(mps, "can_use_cuda", lambda variables: works and mps.PIPES in variables)
    with mps.shared_gpu(ranks) as variables:
        assert variables.get(mps.SHARE) == ("25" if works and ran else None)
        assert not variables or calls.read_text() == "start\n"
    assert calls.exists() == ran and (not ran or calls.read_text() == "start\nquit\n")


def test_ranks_go_on_without_the_service(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "CONTROL", "no-such-program")
    with mps.shared_gpu(4) as variables:
        assert variables == {}
    assert not calls.exists()


@pytest.mark.parametrize(("given", "share"), [("", "25"), ("50", "50")])
def test_service_that_already_runs_is_used_and_left(
    calls: Path, monkeypatch: pytest.MonkeyPatch, given: str, share: str
) -> None:
    monkeypatch.setenv(mps.PIPES, "/run/service")
    monkeypatch.setenv(mps.SHARE, given)
    with mps.shared_gpu(4) as variables:
        assert variables == {mps.SHARE: share}
    assert not calls.exists()

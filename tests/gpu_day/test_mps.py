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
    monkeypatch.setattr(mps.tempfile, "gettempdir", lambda: str(tmp_path))
    for name, value in {"TORCHELASTIC_RUN_ID": "run", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for name in (mps.PIPES, mps.LOGS, mps.SHARE):
        monkeypatch.setenv(name, "")
    return calls


def test_ranks_share_the_gpu_until_the_end(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "can_use_cuda", lambda variables: mps.PIPES in variables)
    with mps.shared_gpu(4) as is_used:
        assert is_used and os.environ[mps.SHARE] == "25" and os.environ[mps.PIPES].endswith("zero-bubble-mps-run")
        monkeypatch.setenv("LOCAL_RANK", "1")
        with mps.shared_gpu(4) as is_used_by_second:
            assert is_used_by_second
        assert calls.read_text() == "start\n"
    assert calls.read_text() == "start\nquit\n"


@pytest.mark.parametrize(("works", "ranks", "ran"), [(True, 4, True), (False, 4, True), (True, 1, False)])
def test_ranks_of_this_process_get_the_variables(
    calls: Path, monkeypatch: pytest.MonkeyPatch, works: bool, ranks: int, ran: bool
) -> None:
    monkeypatch.setattr(mps, "can_use_cuda", lambda _: works)
    with mps.of_ranks(ranks) as variables:
        assert variables.get(mps.SHARE) == ("25" if works and ran else None)
    assert calls.exists() == ran and (not ran or calls.read_text() == "start\nquit\n")


def test_service_that_does_not_work_is_ended(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "can_use_cuda", lambda _: False)
    with mps.shared_gpu(4) as is_used:
        assert not is_used and not os.environ[mps.SHARE]
    assert calls.read_text() == "start\nquit\n"


def test_ranks_go_on_without_the_service(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mps.shared_gpu(1) as is_used:
        assert not is_used
    monkeypatch.setattr(mps, "CONTROL", "no-such-program")
    with mps.shared_gpu(4) as is_used:
        assert not is_used
    assert not calls.exists()


@pytest.mark.parametrize(("given", "share"), [("", "25"), ("50", "50")])
def test_service_that_already_runs_is_used_and_left(
    calls: Path, monkeypatch: pytest.MonkeyPatch, given: str, share: str
) -> None:
    monkeypatch.setenv(mps.PIPES, "/run/service")
    monkeypatch.setenv(mps.SHARE, given)
    with mps.shared_gpu(4) as is_used:
        assert is_used and os.environ[mps.SHARE] == share and os.environ[mps.PIPES] == "/run/service"
    assert not calls.exists()

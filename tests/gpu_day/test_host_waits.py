"""Tests of the check of host calls that wait for the GPU: what it concludes, with blocks that are planted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpu_day import host_waits
from gpu_day.host_waits import KNOWN, SYNCHRONIZE


class Blocks:
    """One block that ends by itself if the work under way takes 2 s or longer."""

    def __init__(self) -> None:
        self.now, self.began = 0.0, 0.0

    def start(self) -> None:
        self.began = self.now

    def stop(self) -> int:
        return int(self.now - self.began < 2.0)


def rows(seconds: dict[str, float]) -> list[dict]:
    blocks, found = Blocks(), []
    for name, takes in seconds.items():

        def work(takes: float = takes) -> None:
            blocks.now += takes

        found.append(host_waits.measure(name, work, blocks, lambda: blocks.now))
    return found


def test_actions_that_outlast_the_blocks_wait() -> None:
    found = rows({KNOWN: 0.001, "cudaFree": 2.5, "cudaMalloc": 0.25, SYNCHRONIZE: 2.5})
    assert [row["waits"] for row in found] == [False, True, False, True]
    assert [row["ms"] for row in found] == pytest.approx([1.0, 2500.0, 250.0, 2500.0])
    figures = host_waits.figures(found)
    assert (figures["waiting"], figures["num_actions"]) == ("cudaFree", 2)
    assert host_waits.invalid(found) is None
    assert host_waits.figures(rows({KNOWN: 0.0, SYNCHRONIZE: 2.5}))["waiting"] == "nothing"


@pytest.mark.parametrize(
    ("known_s", "synchronize_s", "problem"),
    [(2.5, 2.5, "do not run at the same time"), (0.0, 0.0, "the spinning kernel did not run")],
)
def test_controls_fail_the_step(known_s: float, synchronize_s: float, problem: str) -> None:
    found = host_waits.invalid(rows({KNOWN: known_s, "cudaFree": 0.0, SYNCHRONIZE: synchronize_s}))
    assert found is not None and problem in found


@pytest.mark.parametrize("known_s", [0.0, 2.5])
def test_invalid_measurement_is_written_and_fails(
    known_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``main`` with planted rows."""
    pytest.importorskip("triton")
    from gpu_day import spin

    monkeypatch.setattr(spin, "Spinner", lambda *_: None)
    monkeypatch.setattr(host_waits.torch.cuda, "Stream", lambda: None)
    planted = iter(rows({KNOWN: known_s, SYNCHRONIZE: 2.5}))
    monkeypatch.setattr(host_waits, "actions", lambda: iter([(KNOWN, print), (SYNCHRONIZE, print)]))
    monkeypatch.setattr(host_waits, "measure", lambda *_: next(planted))
    output = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["host_waits", "--device", "cuda", "--output", str(output)])
    assert host_waits.main() == (known_s > 0)
    assert re.search('"loading": "LAZY"', output.read_text())

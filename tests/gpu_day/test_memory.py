"""Tests of the steps on memory: gradients of moved activations, and torch within a limit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_day import fragments, offload

ROW = {"iteration_ms": 10.0, "gb_per_s": 1.0, "load": 0.5, "memory": {"allocated": 100, "reserved": 100}, "host": 0}


def bits(*values: float) -> torch.Tensor:
    return torch.tensor(values).view(torch.int32)


@pytest.mark.parametrize(
    ("found", "equal"),
    [([bits(1.0, 0.0), bits(2.0)], True), ([bits(1.0, -0.0), bits(2.0)], False), ([bits(1.0, 0.0), bits(2.5)], False)],
)
def test_gradients_are_compared_by_bits(found: list[torch.Tensor], equal: bool) -> None:
    assert offload.same([bits(1.0, 0.0), bits(2.0)], found) is equal


@pytest.mark.parametrize("wrong", [None, "all", "auto"])
def test_another_gradient_fails_the_step(wrong: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One variant's gradients differ, in one bit."""
    last: list[str | None] = []

    def measure(_job: Any, _file: Path, what: str | None, _options: Any) -> dict[str, Any]:
        last.append(what)
        return {**ROW, "offload": what or "none"}

    job = SimpleNamespace(
        gradients=lambda: iter([bits(1.0), bits(2.0) + int(wrong is not None and last[-1] == wrong)]),
        platform=SimpleNamespace(current_device=lambda: torch.device("cpu")),
    )
    monkeypatch.setattr(offload.gpt, "Gpt", lambda _: job)
    monkeypatch.setattr(offload.gpt, "leave", lambda: None)
    monkeypatch.setattr(offload, "_measure", measure)
    sizes = "--hidden-size 8 --num-layers 1 --seq-length 8 --rounds 1 --mib 1"
    output = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["offload", *sizes.split(), "--device", "cpu", "--output", str(output)])
    assert offload.main() == (wrong is not None)
    figures = json.loads(output.read_text())
    assert figures["same_gradients"] is (wrong is None)
    assert [row["offload"] for row in figures["rows"] if not row.get("same_gradients", True)] == (
        [wrong] if wrong else []
    )


def test_limit_is_a_share_of_the_gpu_and_is_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    retries = iter([3, 10])
    fakes = {
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
        "memory_stats": lambda: {"num_alloc_retries": next(retries)},
        "get_device_properties": lambda _: SimpleNamespace(total_memory=1000),
        "set_per_process_memory_fraction": shares.append,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with fragments.limited("cuda", 230) as flushes:
        assert shares == [0.23]
        assert flushes() == 7
    assert shares == [0.23, 1.0]


def test_worst_rank_counts_within_the_limit() -> None:
    ranks = [{"flushes": 2, "ms": 10.0, "limited_ms": 15.0}, {"flushes": 5, "ms": 10.0, "limited_ms": 11.0}]
    assert fragments.within_limit([{"ranks": ranks[:1]}, {"ranks": ranks[1:]}]) == {"flushes": 5, "slowdown": 0.5}

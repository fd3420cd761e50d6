"""Tests of the steps on several ranks: gains next to predictions, and bandwidth by CTAs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_day import gains, measured_gains, mps, nccl_bandwidth
from site_parts import gpu

SIZES = "--hidden-size 64 --num-layers 4 --seq-length 32 --num-ranks 2 --batches 8 4 --shares 12 8".split()


def started(
    monkeypatch: pytest.MonkeyPatch, folder: Path, slowdowns: dict[str, float], device: str = "cuda"
) -> tuple[dict[str, Any], list[str]]:
    """The figures of the step if ranks with these shares are slowed so much, and the shares that were tried."""
    tried, output = [], folder / "out.json"

    def run(command: list[str], env: dict[str, str], **_: Any) -> None:
        share, allowed = env[mps.SHARE], float(command[command.index("--allowed") + 1])
        tried.append(share)
        found: dict[str, Any] = {"slowdown": slowdowns[share]}
        output.write_text(json.dumps(found if slowdowns[share] > allowed else {**found, "rows": []}))

    monkeypatch.setattr(gains.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["gains", *SIZES, "--device", device, "--output", str(output)])
    assert gains.main() == 0
    return json.loads(output.read_text()), tried


@pytest.mark.parametrize(
    ("slowdowns", "tried"),
    [({"12": 0.02}, ["12"]), ({"12": 0.05, "8": 0.01}, ["12", "8"]), ({"12": 0.05, "8": 0.04}, ["12", "8"])],
)
def test_smaller_shares_are_tried_until_ranks_do_not_slow_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slowdowns: dict[str, float], tried: list[str]
) -> None:
    """The last one is measured in any case; its slowdown is in the figures."""
    monkeypatch.setenv(mps.SHARE, "25")
    found, shares = started(monkeypatch, tmp_path, slowdowns)
    assert shares == tried and str(found["share"]) == tried[-1] and "rows" in found
    assert [one["slowdown"] for one in found["tries"]] == [slowdowns[share] for share in tried]


def test_gains_mean_nothing_without_the_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(mps.SHARE, raising=False)
    found, shares = started(monkeypatch, tmp_path, {})
    assert "Multi-Process Service" in found["skip_reason"] and not shares


def test_gains_are_those_over_stock_with_as_many_microbatches() -> None:
    times = {
        (8, "stock"): [100.0, 104.0, 90.0],
        (8, "zb-v"): [80.0, 85.0, 79.0],
        (4, "stock"): [60.0],
        (4, "zb-v"): [66.0],
    }
    predicted = {(8, "stock"): 50.0, (8, "zb-v"): 40.0, (4, "stock"): 30.0, (4, "zb-v"): 24.0}
    rows = measured_gains.rows_of(times, predicted)
    assert [row["measured"] for row in rows] == pytest.approx([0.0, 0.2, 0.0, -0.1])
    assert [row["predicted"] for row in rows] == pytest.approx([0.0, 0.2, 0.0, 0.2])
    assert measured_gains.figures_of(rows)["zb_v_measured"] == pytest.approx(0.2)
    tries = [{"share": 12, "slowdown": 0.05}, {"share": 8, "slowdown": 0.01}]
    text = gpu._apart({"rows": rows, "tries": tries, "num_ranks": 4, "ranks_per_gpu": 4})
    assert "12 % (+5.0%), 8 % (+1.0%); the last counts" in text
    assert "| 8 | zb-v | 40.0 | 80.0 | +20.0% | +20.0% |" in text and "| 4 | stock | 30.0 | 60.0 | - | - |" in text


def test_fewest_ctas_that_are_fast_enough() -> None:
    speeds = {1: 20.0, 2: 46.0, 4: 50.0, 8: 48.0}
    rows = [{"ctas": ctas, "gb_per_s": speed, "slowdown": ctas / 100} for ctas, speed in speeds.items()]
    assert nccl_bandwidth.figures(rows) == {
        "best_ctas": 4,
        "best_gb_per_s": 50.0,
        "enough_ctas": 2,
        "enough_gb_per_s": 46.0,
        "slowdown": 0.02,
    }


class Done:
    def wait(self) -> None:
        pass


@pytest.mark.parametrize("lost", [0, 1])
def test_message_that_does_not_arrive_is_seen(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_bandwidth.dist, "get_rank", lambda: 1)
    message = torch.zeros(4)

    def receive() -> Any:
        message[lost:] = 1.0
        return Done()

    assert nccl_bandwidth._arrives(receive, message) is (lost == 0)

"""The pages "Coming from": what their tables say of other schedulers' schedules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from tests.helpers.torch_orders import csv_of_torch

PAGE = (Path(__file__).parents[1] / "docs/from-torch-pipelining.md").read_text()
ROWS = re.findall(r"^\| `(Schedule\w+)` \| ([\d.]+) %.*? \| `([\w-]+)` \| ([\d.]+) %", PAGE, re.MULTILINE)
COSTS = "--num-ranks 8 --num-microbatches 24 --forward-ms 18.5 --backward-ms 18.1 --wgrad-ms 9.3 --comm-ms 0.6"


def bubble(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", *COSTS.split(), "--wgrad-memory", "0.43", *flags.split()]) == 0
    found = re.search(r"bubble ([\d.]+)% of makespan", capsys.readouterr().out)
    assert found
    return found[1]


@pytest.mark.parametrize(("theirs", "their_bubble", "ours", "our_bubble"), ROWS)
def test_bubbles_of_torch(
    theirs: str, their_bubble: str, ours: str, our_bubble: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "torch.csv"
    file.write_text(csv_of_torch(theirs, 8, 24))
    assert bubble(f"--schedule-file {file}", capsys) == their_bubble
    assert bubble(f"--schedule {ours}", capsys) == our_bubble


def test_five_schedules_of_torch_are_compared() -> None:
    assert len(ROWS) == 5

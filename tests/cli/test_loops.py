"""Loops and waves in ``plan`` and ``compare``, and their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.formats.plan import read_schedule_file
from megatron.zero_bubble.core.ir import Placement

SIZE = "--num-ranks 4 --num-microbatches 4 --forward-ms 12 --backward-ms 12 --wgrad-ms 12 --comm-ms 0.2"
AUTO = f"plan --schedule zb-auto {SIZE}"
Capture = pytest.CaptureFixture[str]


def said(command: str, capsys: Capture, code: int = 0) -> str:
    assert main(command.split()) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


@pytest.mark.parametrize(
    ("flags", "placement", "ms"),
    [
        ("--placement loop --num-chunks 4", Placement.interleaved(4, 4), 156.6),
        ("--placement wave --num-chunks 4", Placement.wave(4, 4), 156.0),
        ("--num-chunks 2", Placement.vee(4), 163.8),
    ],
)
def test_a_plan_has_the_placement_and_its_file_plans_the_same(
    flags: str, placement: Placement, ms: float, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(said(f"{AUTO} {flags} --objective makespan --format json", capsys))
    assert read_schedule_file(file).placement == placement
    again = json.loads(said(f"plan --schedule-file {file} {SIZE} --format json", capsys))
    assert again["makespan_ms"] == pytest.approx(ms)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--placement wave --num-chunks 3", "the stages per rank must be even; got 3; give 4, or use a loop"),
        ("--placement vee --num-chunks 4", "the placement 'vee' has 2 stage(s) per rank; got 4"),
        ("--placement loop --num-chunks 0", "num_chunks must be 1 or more; got 0"),
    ],
)
def test_numbers_of_stages_that_a_placement_cannot_have_are_refused(flags: str, sentence: str, capsys: Capture) -> None:
    assert sentence in said(f"{AUTO} {flags}", capsys, 2)


@pytest.mark.full
def test_a_comparison_has_a_row_and_a_bound_per_placement(capsys: Capture) -> None:
    size = f"{SIZE} --num-ranks 2 --num-microbatches 2"
    table = json.loads(said(f"compare {size} --num-chunks 4 --max-chunks 1 --format json", capsys))
    rows = {(row["schedule"], row["placement"]): row["span_ms"] for row in table["rows"]}
    bounds = table["lower_bound_ms"]
    assert list(bounds) == ["linear", "vee", "loop x4", "wave x4"]
    for name, bound in bounds.items():
        placement, _, chunks = name.replace("loop", "interleaved").partition(" x")
        assert bound <= rows[f"zb-auto x{chunks}" if chunks else "zb-auto", placement] * (1 + 1e-9)


def test_placements_with_more_stages_than_layers_drop_out_with_the_reason(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(Path("configs/llama_70b.yaml").read_text().replace("num-layers: 80", "num-layers: 8"))
    own = f"--config {file} --num-ranks 4 --num-microbatches 4 --num-chunks auto"
    text = said(f"plan --schedule zb-auto --placement loop {own}", capsys)
    for label in ("loop x3", "loop x4"):
        assert any(line.startswith(label) and "layers" in line for line in text.splitlines()), text
    rows = json.loads(said(f"compare --placement loop --max-chunks 1 {own} --format json", capsys))["rows"]
    assert [row["schedule"] for row in rows if row["placement"] == "interleaved"] == ["zb-auto x2"]

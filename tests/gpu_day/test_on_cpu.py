"""``bash scripts/gpu_day.sh PART --cpu``: every step that needs no GPU runs, and the details of the page fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_day.steps import NEEDS_GPU, OK, PARTS
from site_parts import gpu
from tests.helpers.rows import some

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", some(PARTS, "wgrad"))
def test_part_runs_without_a_gpu(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"ZB_PYTHON": sys.executable}
    command = ["bash", "scripts/gpu_day.sh", name, "--cpu", "--folder", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads((tmp_path / "gpu_day.json").read_text())[name]
    steps = {step["name"]: step for step in record["steps"]}
    expected = {step.name: NEEDS_GPU if step.on_cpu is None else OK for step in PARTS[name].steps}
    assert {step: found["status"] for step, found in steps.items()} == expected
    text = gpu.results({name: record | {"machine": record["machine"] | {"driver": ["none"]}}})
    assert text.count("\n**") == sum(step in gpu._DETAILS for step, found in steps.items() if found["status"] == OK)

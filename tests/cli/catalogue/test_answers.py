"""Tests of the limits on the answer to one recipe."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.cli.catalogue.answers import rows_of
from megatron.zero_bubble.cli.catalogue.judge import GAINS, UNANSWERED, judged
from megatron.zero_bubble.cli.catalogue.recipe import Recipe
from tests.helpers.processes import running, until

JOB = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --swiglu --bf16 --lr 1 "
    "--max-position-embeddings 4096 --vocab-size 32000 --untie-embeddings-and-output-weights --train-iters 9 "
    "--pipeline-model-parallel-size 8 --micro-batch-size 1 --global-batch-size"
)
HUGE = 100_000


def recipe(batch: int) -> Recipe:
    return Recipe(f"batch {batch}", (*JOB.split(), str(batch)))


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        pytest.param({"seconds": 2}, "it took longer than 2 s of CPU; ask zero-bubble advise", marks=pytest.mark.full),
        ({"gib": 0.25}, "it took more than 0.25 GiB of memory; ask zero-bubble advise"),
    ],
)
def test_a_recipe_that_takes_too_much_is_a_row_and_the_next_is_answered(limits: Mapping[str, Any], reason: str) -> None:
    huge, other = rows_of([recipe(HUGE), recipe(16)], "h100", **limits)
    assert (huge.name, huge.outcome, huge.option) == (f"batch {HUGE}", UNANSWERED, "--global-batch-size")
    assert huge.reason.startswith(reason)
    assert (other.name, other.outcome) == ("batch 16", GAINS)
    assert 0 < other.seconds < 30


def test_a_schedule_that_is_too_large_to_be_planned_does_not_make_a_job_broken() -> None:
    row = judged(recipe(300_000), "h100")
    assert row.outcome == UNANSWERED
    assert "must be at most 2,000,000; got 8 x 1 x 300,000 x 1" in row.reason


def test_an_error_of_ours_is_a_row(capfd: pytest.CaptureFixture[str]) -> None:
    wrong, right = rows_of([Recipe("wrong", (*JOB.split(), "16"), gpus="many"), recipe(16)], "h100")  # type: ignore[arg-type]
    assert (wrong.outcome, right.outcome) == (UNANSWERED, GAINS)
    assert wrong.reason == (
        "an error of this package ended its worker with exit status 1; report it with its traceback"
    )
    assert wrong.option == ""
    assert "TypeError" in capfd.readouterr().err


def test_a_worker_imports_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resource.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    (row,) = rows_of([recipe(16)], "h100")
    assert row.outcome == GAINS


CATALOGUE = f"""
from megatron.zero_bubble.cli.catalogue.answers import rows_of
from megatron.zero_bubble.cli.catalogue.recipe import Recipe

list(rows_of([Recipe("huge", {(*JOB.split(), str(HUGE))})], "h100", seconds=600))
"""


def test_a_worker_ends_with_the_catalogue(tmp_path: Path) -> None:
    marked = os.environ | {"PYTHONPATH": str(tmp_path)}  # a word of the worker's command
    with subprocess.Popen([sys.executable, "-c", CATALOGUE], env=marked, stderr=subprocess.DEVNULL) as parent:
        assert until(lambda: running(tmp_path) != "")
        parent.kill()
    assert until(lambda: running(tmp_path) == "")

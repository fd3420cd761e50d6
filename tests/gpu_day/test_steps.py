"""Tests of the table of steps: the arguments for GPUs are accepted, and selections of tests select something."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_day.steps import PARTS

ROOT = Path(__file__).parents[2]
STEPS = {f"{name}, {step.name}": step for name, part in PARTS.items() for step in part.steps}
MEASURING = {name: step for name, step in STEPS.items() if step.module != "pytests"}
TESTING = {name: step for name, step in STEPS.items() if step.module == "pytests"}


class Parsed(Exception):
    """Raised in place of the measurement."""


@pytest.mark.parametrize("name", MEASURING)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_modules_accept_their_arguments(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = MEASURING[name]
    arguments = step.arguments if device == "cuda" else step.on_cpu
    if arguments is None:
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *_: Any) -> None:
        parse(parser)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    words = [*shlex.split(arguments), "--device", device, "--output", "here.json"]
    monkeypatch.setattr(sys, "argv", [step.module, *words])
    with pytest.raises(Parsed):
        importlib.import_module(f"gpu_day.{step.module}").main()


def keywords(selection: list[str]) -> list[str]:
    return selection[selection.index("-k") + 1].split(" and ") if "-k" in selection else []


@pytest.mark.full
def test_selections_select_tests() -> None:
    """``-k`` and paths of every step, compared with the names of the collected tests."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        "",
        "tests/gpu",
        "tests/engine/kernels",
        "tests/engine/platforms",
    ]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tests = [line for line in listing.splitlines() if "::" in line]
    for name, step in TESTING.items():
        for arguments in filter(None, (step.arguments, step.on_cpu)):
            selection = shlex.split(arguments)
            paths = [word for word in selection if word.startswith("tests/")]
            selected = [
                test
                for test in tests
                if test.startswith(tuple(paths)) and all(key.lower() in test.lower() for key in keywords(selection))
            ]
            assert paths and selected, f"{name}: {arguments}"


def test_all_whole_runs_are_in_a_part() -> None:
    """Every test of whole runs is selected by a step."""
    text = (ROOT / "tests/gpu/test_whole_runs.py").read_text()
    names = re.findall(r"^def (test_\w+)", text, re.MULTILINE)
    used = [keywords(shlex.split(step.arguments))[0] for step in TESTING.values() if "whole_runs" in step.arguments]
    assert [name for name in names if not any(word in name for word in used)] == []

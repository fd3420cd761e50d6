"""Tests of ``zero-bubble trace``: all output formats of a recorded iteration, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zero_bubble.core.formats.trace import trace_to_json
from tests.core.formats.test_trace import recording
from tests.helpers.trace_format import problems
from tests.test_main import Capture, fails, run


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "trace.json"
    path.write_text(trace_to_json(recording()))
    return str(path)


def test_text_compares_plan_and_measurement(capsys: Capture, file: str) -> None:
    first, planned, measured, chain, _, *ranks = run(capsys, "trace", file).splitlines()
    assert first == "iteration 12"
    assert planned.startswith("planned   zb-h1: 2 ranks, 2 microbatches, ")
    assert measured.startswith("measured  zb-h1: 2 ranks, 2 microbatches, ")
    assert chain.startswith(
        "measured minus planned: +4.00 ms, along the critical chain slow passes +4.00, transfers +0"
    )
    assert len(ranks) == 2


def test_several_files_are_printed_in_order(capsys: Capture, file: str) -> None:
    assert run(capsys, "trace", file, file) == "\n".join([run(capsys, "trace", file)] * 2)


def test_iteration_can_be_chosen(capsys: Capture, file: str) -> None:
    assert "measured minus planned: +9.00 ms" in run(capsys, "trace", file, "--iteration", "7")


def test_picture_formats(capsys: Capture, file: str) -> None:
    assert run(capsys, "trace", file, "--format", "svg").startswith("<svg")
    assert run(capsys, "trace", file, "--format", "html").startswith("<!doctype html>")
    assert problems(run(capsys, "trace", file, "--format", "perfetto")) == []


def test_output_file(capsys: Capture, file: str, tmp_path: Path) -> None:
    assert run(capsys, "trace", file, "--format", "html", "--output", str(tmp_path / "page.html")) == ""
    assert (tmp_path / "page.html").read_text() == run(capsys, "trace", file, "--format", "html")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{file}", "--iteration", "3"], "iteration 3 was not recorded; choose one of 7, 8, 12"),
        (["{file}", "{file}", "--format", "html"], "--format html draws one file; got 2; leave --format out or give"),
        (["{file}", "--output", "/no/such/folder"], "cannot write /no/such/folder: No such file or directory; give"),
        (["/no/such.json"], "cannot read the trace file /no/such.json: No such file or directory"),
        ([__file__], "it must be JSON; line 1, column 3: Extra data"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_sentence(
    capsys: Capture, file: str, arguments: list[str], message: str
) -> None:
    err = fails(capsys, "trace", *(argument.format(file=file) for argument in arguments))
    assert err.startswith("zero-bubble trace: ")
    assert message in err
    assert err.count("\n") == 1

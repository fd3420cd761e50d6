"""Tests of programs of others that are run so that nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.zero_bubble.cli.catalogue.contained import CROWDED, ENDLESS, run_contained
from tests.helpers.processes import running, until

LEAVES = "builtin set -m; coproc A { read -t 600 x; }; coproc B { read -t 600 x; }; wait"
"""A script of which two parts wait, in groups of their own."""
CATALOGUE = """
import signal

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.catalogue import shell

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background inherits that it is ignored
shell._SECONDS = 600
main(["catalogue", "."])
"""
"""A catalogue that does not end its scripts in the time of a test."""


def test_the_exit_status_is_the_programs(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_contained(["bash", "-c", "echo said; exit 7"], 60, 100) == ("", 7)
    assert run_contained(["bash", "-c", "kill -9 $$"], 60, 100) == ("", -9)
    assert capfd.readouterr().out == "said\n"


@pytest.mark.parametrize(("seconds", "most", "why"), [(1, 100, ENDLESS), (60, 1, CROWDED)])
def test_a_limit_ends_all_of_it(tmp_path: Path, seconds: int, most: int, why: str) -> None:
    assert run_contained(["bash", "-c", LEAVES, str(tmp_path)], seconds, most)[0] == why
    assert running(tmp_path) == ""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_catalogue_that_is_ended(tmp_path: Path, sent: signal.Signals) -> None:
    mark = tmp_path / "waits.sh"
    mark.write_text(f"# --pipeline-model-parallel-size\n{LEAVES}\n")
    command = [sys.executable, "-c", CATALOGUE]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True) as parent:
        assert until(lambda: len(running(mark).split()) >= 4), "the keeper, the script and its parts"
        os.kill(parent.pid, sent)
    assert until(lambda: running(mark) == "")

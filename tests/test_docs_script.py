"""Tests of what scripts/docs.sh downloads: within a limit of time, and with a sentence where that fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.zero_bubble.cli.playground.static import PYODIDE

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
SHORT = 'exec "$REAL" 1 "${@:2}"'
"""A ``timeout`` that waits for a second at most."""


def install(folder: Path, npm: str) -> subprocess.CompletedProcess[str]:
    """Install Pyodide into a folder, with an npm that does this."""
    for name, text in (("npm", npm), ("timeout", SHORT)):
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/usr/bin/env bash\n{text}\n")
        program.chmod(0o755)
    (folder / "scripts").mkdir(exist_ok=True)
    (folder / "scripts/setup_env.sh").touch()
    script = shutil.copy(SCRIPTS / "install_pyodide.sh", folder / "scripts")
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = os.environ | {"PATH": path, "REAL": str(shutil.which("timeout"))}
    return subprocess.run(["bash", script], env=own, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("npm", "reason"),
    [
        ("echo npm error code ENOTFOUND >&2; echo more; exit 1", "npm error code ENOTFOUND"),
        ("sleep 600", "no answer"),
    ],
)
def test_without_a_network_pyodide_is_a_sentence_in_time(tmp_path: Path, npm: str, reason: str) -> None:
    done = install(tmp_path, npm)
    assert done.returncode == 1
    begins = f"install_pyodide.sh: npm cannot get pyodide@{PYODIDE} within 5 minutes: {reason}; connect this machine to"
    assert done.stderr.startswith(begins) and done.stderr.count("\n") == 1
    assert list((tmp_path / "build").iterdir()) == [], "nothing is left of it"


def test_installed_pyodide_needs_no_npm(tmp_path: Path) -> None:
    (tmp_path / f"build/pyodide-{PYODIDE}").mkdir(parents=True)
    done = install(tmp_path, "exit 1")
    assert (done.returncode, done.stderr) == (0, "")

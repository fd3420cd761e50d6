"""The playground as files for any file server: its page asks a planner in the browser, in place of a server of ours.

The planner is this package on Pyodide, which is CPython compiled to WebAssembly: the same code gives the same answers.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from megatron.zero_bubble.cli.playground.page import build_page
from megatron.zero_bubble.cli.playground.questions import catalogue

PYODIDE = "0.29.4"
"""The version of the npm package ``pyodide`` that the tests use."""
RUNTIME = ("pyodide.js", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
"""The files of that package which the page loads from its folder ``pyodide``."""
_PACKAGE = Path(__file__).parents[2]
_DAY = (1980, 1, 1, 0, 0, 0)
"""The time of every file in the archive, so that the same sources make the same archive."""


def static_files(home: str = "") -> dict[str, bytes]:
    """Return the files of the playground by name, without those of Pyodide.

    Args:
        home: the address of a page to which it links.
    """
    page = build_page({**catalogue(), "has_server": False, "home": home})
    worker = Path(__file__).parent / "page" / "worker.js"
    return {"index.html": page.encode(), "worker.js": worker.read_bytes(), "planner.zip": _sources()}


def _sources() -> bytes:
    """This package as an archive."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", compresslevel=9) as made:
        for file in sorted(_PACKAGE.rglob("*.py")):
            name = f"megatron/zero_bubble/{file.relative_to(_PACKAGE).as_posix()}"
            made.writestr(zipfile.ZipInfo(name, _DAY), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive.getvalue()

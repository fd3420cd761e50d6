"""MkDocs hook: add files to the site that are not in docs/: the changelog, how to contribute, and the playground, which
plans in the browser.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from megatron.zero_bubble.cli.playground.static import PYODIDE, RUNTIME, static_files

PLAYGROUND = "playground"
OF_REPOSITORY = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages, and the files at the root of the repository that they are."""
_ROOT = Path(__file__).resolve().parents[1]
_ELSEWHERE = re.compile(r"\[([^\]]*)\]\(tests/[^)]*\)")
"""A link to a file that the site does not have."""
_playground = cache(static_files)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files; those of Pyodide where scripts/install_pyodide.sh has unpacked it."""
    for name, content in _playground(home="../index.html").items():
        files.append(File.generated(config, f"{PLAYGROUND}/{name}", content=content))
    runtime = _ROOT / "build" / f"pyodide-{PYODIDE}"
    for name in RUNTIME if runtime.exists() else ():
        files.append(File.generated(config, f"{PLAYGROUND}/pyodide/{name}", abs_src_path=str(runtime / name)))
    for page, name in OF_REPOSITORY.items():
        files.append(File.generated(config, page, content=_from_docs((_ROOT / name).read_text(encoding="utf-8"))))
    return files


def _from_docs(text: str) -> str:
    """Text at the root of the repository with its links as from docs/."""
    return _ELSEWHERE.sub(r"\1", text.replace("](docs/", "]("))

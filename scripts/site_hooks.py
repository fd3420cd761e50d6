"""MkDocs hook: add pages to the site that are not in docs/: the changelog, how to contribute, and the playground's page
of precomputed settings.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from megatron.zero_bubble.cli.playground.static import static_page

PAGE = "playground-static.html"
OF_REPOSITORY = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages, and the files at the root of the repository that they are."""
_ROOT = Path(__file__).resolve().parents[1]
_ELSEWHERE = re.compile(r"\[([^\]]*)\]\(tests/[^)]*\)")
"""A link to a file that the site does not have."""
_planned = cache(static_page)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages. That of the playground is planned once per process."""
    files.append(File.generated(config, PAGE, content=_planned()))
    for page, name in OF_REPOSITORY.items():
        files.append(File.generated(config, page, content=_from_docs((_ROOT / name).read_text(encoding="utf-8"))))
    return files


def _from_docs(text: str) -> str:
    """Text at the root of the repository with its links as from docs/."""
    return _ELSEWHERE.sub(r"\1", text.replace("](docs/", "]("))
